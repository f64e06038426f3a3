// The runtime of builds without CUDA: no GPU and no kernels. Such builds have all host code and can
// plan for a described GPU.
#include "cuda/backend.h"
#include "cuda/common/kernels.h"
#include "cuda/launch_list.h"
#include "cuda/runtime.h"

namespace tilewise::cuda {
namespace {

constexpr const char* kWhy = "this library was built without CUDA";

}  // namespace

CudaVersions cuda_versions() { return {}; }

int32_t gpu_count(std::string* why) {
  if (why != nullptr) *why = kWhy;
  return 0;
}

const Gpu& gpu(int32_t) { throw Error(kWhy); }
std::string gpu_name(int32_t) { throw Error(kWhy); }
int64_t gpu_memory_bytes(int32_t) { throw Error(kWhy); }

DeviceScope::DeviceScope(int32_t) { throw Error(kWhy); }
DeviceScope::~DeviceScope() = default;

void encode_tensor_map(TensorMap&, const TensorMapShape&) { throw Error(kWhy); }
bool is_captured(Stream) { throw Error(kWhy); }
void read_back(void*, const void*, int64_t, Stream) { throw Error(kWhy); }
void* address_on_device(const void*) { throw Error(kWhy); }
void read_and_clear(void*, void*, int64_t) { throw Error(kWhy); }
std::string kernel_symbol(const void*) { throw Error(kWhy); }

namespace detail {
void launch(const void*, int64_t, int32_t, int32_t, Stream, Start, int32_t, const void*) {
  throw Error(kWhy);
}
}  // namespace detail

namespace common {
const TensorKernels& tensor_kernels(int32_t) { throw Error(kWhy); }
const Kernel<PrepareParams>& prepare_kernel() { throw Error(kWhy); }
const Kernel<ReduceParams>& reduce_kernel() { throw Error(kWhy); }
const Kernel<CheckParams>& check_kernel() { throw Error(kWhy); }
const Kernel<WidenParams>& widen_kernel() { throw Error(kWhy); }
const void* index_record_symbol() { throw Error(kWhy); }
}  // namespace common

}  // namespace tilewise::cuda
