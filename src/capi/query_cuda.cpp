// Queries about the GPUs of this machine and the CUDA code in this library.
#include <cstdio>

#include "capi/refusal.h"
#include "capi/versioned.h"
#include "capi/views.h"
#include "cuda/backend.h"
#include "cuda/kernel_set.h"
#include "dispatch/device.h"
#include "dispatch/proofs.h"

using namespace tilewise;

namespace {

tilewise_gpu_info describe_gpu(int32_t index) {
  std::string why;
  const int32_t gpus = cuda::gpu_count(&why);
  if (gpus == 0 && cuda::registry().code.empty()) {  // a library without CUDA code looks for none
    capi::refuse(TILEWISE_UNSUPPORTED, "no GPU is used: ", why,
                 "; for a library that uses GPUs, build where nvcc is installed: pip install . "
                 "-Ccmake.define.TILEWISE_CUDA=ON, or cmake -DTILEWISE_CUDA=ON");
  }
  if (gpus == 0) capi::refuse(TILEWISE_UNSUPPORTED, "there is no GPU: ", why);
  capi::check_range("index", index, 0, gpus - 1);
  const dispatch::Device device = dispatch::this_gpu(index);
  const std::string problem = dispatch::forced_table_problem(device);
  capi::require(problem.empty(), problem);
  const cuda::Gpu& gpu = device.gpu;
  tilewise_gpu_info info{};
  info.sm = gpu.sm;
  info.multiprocessors = gpu.sm_count;
  info.shared_bytes = gpu.shared_bytes;
  info.l2_bytes = gpu.l2_bytes;
  info.table = dispatch::tile_table(device);
  info.tensor_cores = info.table != 0 && cuda::registry().runs(info.table, gpu.sm) ? 1 : 0;
  info.plain_cores = cuda::registry().runs(0, gpu.sm) ? 1 : 0;
  info.memory_bytes = cuda::gpu_memory_bytes(index);
  std::snprintf(info.name, sizeof(info.name), "%s", cuda::gpu_name(index).c_str());
  return info;
}

tilewise_cuda_code_info describe_code(int32_t index) {
  int32_t row = 0;
  tilewise_cuda_code_info info{};
  for (const cuda::Code& code : cuda::registry().code) {
    for (const bool ptx : {false, true}) {
      for (const int32_t sm : ptx ? code.ptx : code.sass) {
        if (row++ != index) continue;
        info.table = code.architecture;
        info.sm = sm;
        info.ptx = ptx ? 1 : 0;
        return info;
      }
    }
  }
  if (row == 0) capi::refuse(TILEWISE_UNSUPPORTED, "this library has no CUDA code");
  capi::refuse_range("index", index, 0, row - 1);
}

tilewise_index_error last_index_error(int32_t device_index) {
  std::string why;
  const int32_t gpus = cuda::gpu_count(&why);
  if (gpus == 0) capi::refuse(TILEWISE_UNSUPPORTED, "there is no GPU: ", why);
  capi::check_range("device_index", device_index, 0, gpus - 1);
  IndexFault fault{};
  const cuda::IndexError found = cuda::last_index_error(device_index, &fault);
  tilewise_index_error error{};
  if (!fault.any()) return error;
  error.found = 1;
  error.index = fault.index;
  error.entry = fault.second;
  error.value = fault.value;
  error.allowed = fault.allowed;
  std::snprintf(error.array, sizeof(error.array), "%s", found.array.c_str());
  std::snprintf(error.sentence, sizeof(error.sentence), "%s", found.sentence.c_str());
  return error;
}

void check_family(const std::string& name) {
  std::string allowed;
  for (const cuda::FamilyRow* row : dispatch::families().cuda) {
    if (row->proved) continue;
    if (row->facts.name == name) return;
    allowed += (allowed.empty() ? "" : ", ") + std::string(row->facts.name);
  }
  capi::refuse(TILEWISE_INVALID_ARGUMENT, "proof.family is \"", name,
               "\": it must be one of the families that are not proved: ", allowed);
}

void set_proof(const tilewise_proof& given) {
  capi::require(given.family != nullptr, "proof.family is NULL: a name is needed");
  capi::require(given.gpu_name != nullptr, "proof.gpu_name is NULL: a name is needed");
  check_family(given.family);
  capi::check_range("proof.head_dims_count", given.head_dims_count, 0, kMaxHeadDim);
  capi::require(given.head_dims != nullptr || given.head_dims_count == 0,
                "proof.head_dims is NULL: proof.head_dims_count is ", given.head_dims_count);
  const std::vector<int32_t> head_dims(given.head_dims, given.head_dims + given.head_dims_count);
  for (int32_t head_dim : head_dims) capi::check_range("proof.head_dims", head_dim, 1, kMaxHeadDim);
  dispatch::set_proof({.gpu_name = given.gpu_name, .sm = given.sm, .driver = given.driver},
                      {.family = given.family, .head_dims = head_dims});
}

}  // namespace

tilewise_status tilewise_set_proof(const tilewise_proof* proof) {
  return capi::guarded([&] { set_proof(capi::read_struct(proof, "proof")); });
}

tilewise_status tilewise_last_index_error(int32_t device_index, tilewise_index_error* error) {
  return capi::guarded([&] {
    capi::check_struct_size(error, "error");
    capi::write_struct(last_index_error(device_index), error);
  });
}

tilewise_status tilewise_gpu(int32_t index, tilewise_gpu_info* info) {
  return capi::guarded([&] {
    capi::check_struct_size(info, "info");
    capi::write_struct(describe_gpu(index), info);
  });
}

tilewise_status tilewise_cuda_code(int32_t index, tilewise_cuda_code_info* info) {
  return capi::guarded([&] {
    capi::check_struct_size(info, "info");
    capi::write_struct(describe_code(index), info);
  });
}

void tilewise_cuda_versions(int32_t* runtime, int32_t* driver) {
  const cuda::CudaVersions versions = cuda::cuda_versions();
  if (runtime != nullptr) *runtime = versions.runtime;
  if (driver != nullptr) *driver = versions.driver;
}
