// The entry points plan, forward, backward and append: validate, decide, run. This file has no
// logic of its own.
#include <cstddef>
#include <cstdio>

#include "base/parallel.h"
#include "base/size.h"
#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"
#include "cpu/append.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "dispatch/planner.h"

namespace tilewise::capi {
namespace {

constexpr int64_t kWorkspaceAlignment = 64;

dispatch::Device gpu_of(int32_t index) {
  std::string why;
  const int32_t gpus = cuda::gpu_count(&why);
  if (gpus == 0) {
    refuse(TILEWISE_UNSUPPORTED, "device is CUDA: ", why,
           "; tensors in the memory of the CPU are allowed");
  }
  check_range("device_index", index, 0, gpus - 1);
  const dispatch::Device device = dispatch::this_gpu(index);
  const std::string problem = dispatch::forced_table_problem(device);
  if (!problem.empty()) refuse(TILEWISE_UNSUPPORTED, problem);
  return device;
}

dispatch::Device device_of(const Problem& p, int32_t threads) {
  if (p.device == TILEWISE_CUDA) return gpu_of(p.device_index);
  const std::string problem = dispatch::environment_problem();
  require(problem.empty(), problem);
  return dispatch::this_cpu(threads);
}

// A fault that the check on a GPU finds is the caller's mistake, not the library's: it becomes a
// refusal.
template <class Launch>
void on_gpu(const Launch& launch) {
  try {
    launch();
  } catch (const cuda::InvalidArgument& argument) {
    refuse(TILEWISE_INVALID_ARGUMENT, argument.what());
  }
}

// Sizes can be valid one by one but too large together.
template <class... Parts>
[[noreturn]] void refuse_sizes(tilewise_status status, const Problem& p, const Parts&... what) {
  refuse(status, "batch ", p.batch, ", seqlen_q ", p.seqlen_q, ", keys ", key_capacity(p),
         ", heads_q ", p.heads_q, ", heads_kv ", p.heads_kv, " and num_splits ", p.num_splits,
         " together take ", what...);
}

void check_extent(const dispatch::Decision& decision, const Problem& p) {
  if (decision.on_gpu() && !decision.cuda.can_be_launched()) {
    refuse_sizes(TILEWISE_UNSUPPORTED, p, decision.cuda.grid, " blocks of a GPU: at most ",
                 cuda::Plan::kMaxBlocks, " are allowed");
  }
  if (!Size(decision.workspace_bytes()).fits()) {
    refuse_sizes(TILEWISE_INVALID_ARGUMENT, p, "a workspace of more than the allowed ", Size::kMax,
                 " bytes");
  }
}

// The explanation is made only for tilewise_plan and refusals: a launch allocates nothing.
dispatch::Decision decide(const Request& request, const dispatch::Device& device) {
  dispatch::Decision decision = dispatch::plan(request, device);
  if (decision.status != TILEWISE_OK)
    refuse(decision.status, dispatch::explain(decision, request, device));
  check_extent(decision, request.problem);
  return decision;
}

void fill(char* text, std::size_t size, const std::string& value) {
  std::snprintf(text, size, "%s", value.c_str());
}

tilewise_plan_info describe(const Request& request, const dispatch::Device& device, bool texts) {
  const dispatch::Decision decision = decide(request, device);
  tilewise_plan_info info{};
  info.workspace_bytes = decision.workspace_bytes();
  if (decision.on_gpu()) {
    info.splits = decision.cuda.splits;
    info.tile_q = decision.cuda.tile_q;
    info.tile_k = decision.cuda.tile_k;
  } else {
    info.threads = decision.cpu.threads;
    info.splits = decision.cpu.splits;
    info.tile_q = decision.cpu.tile_q;
    info.tile_k = decision.cpu.tile_k;
  }
  if (!texts) return info;
  fill(info.kernel, sizeof(info.kernel), dispatch::kernel_name(decision, request));
  fill(info.why, sizeof(info.why), dispatch::explain(decision, request, device));
  return info;
}

void check_workspace(const void* workspace, int64_t given, int64_t needed) {
  require(given >= 0, "workspace_bytes is ", given, ": it must be 0 or more");
  if (needed == 0) return;
  if (given < needed) {
    refuse(TILEWISE_WORKSPACE_TOO_SMALL, "workspace_bytes is ", given, ": at least ", needed,
           " are needed, as tilewise_plan says for the same struct");
  }
  require(workspace != nullptr, "workspace is NULL: ", needed, " bytes are needed");
  check_aligned("workspace", workspace, kWorkspaceAlignment);
}

void plan(const tilewise_attention* attention, const tilewise_gradients* gradients,
          int32_t given_pass, tilewise_plan_info* info) {
  const Pass pass = checked_pass(given_pass);
  check_struct_size(info, "plan");
  require(pass == Pass::backward || gradients == nullptr,
          "gradients is given for the forward pass: it must be NULL");
  const Problem p = validated_problem(attention, pass, Contents::unread);
  const Gradients g =
      pass == Pass::backward ? validated_gradients(gradients, p, Contents::unread) : kNoGradients;
  const int32_t threads = make_parallel(p.parallel).threads;
  const bool texts = info->struct_size > offsetof(tilewise_plan_info, kernel);
  write_struct(describe({p, pass, g}, device_of(p, threads), texts), info);
}

void run(const Request& request, void* workspace, int64_t workspace_bytes) {
  const Parallel parallel = make_parallel(request.problem.parallel);
  const dispatch::Decision decision = decide(request, device_of(request.problem, parallel.threads));
  check_workspace(workspace, workspace_bytes, decision.workspace_bytes());
  on_gpu([&] { dispatch::launch(decision, request, workspace, parallel); });
}

void forward(const tilewise_attention* attention, void* workspace, int64_t workspace_bytes) {
  run(validated_problem(attention, Pass::forward, Contents::read), workspace, workspace_bytes);
}

void backward(const tilewise_attention* attention, const tilewise_gradients* gradients,
              void* workspace, int64_t workspace_bytes) {
  const Problem p = validated_problem(attention, Pass::backward, Contents::read);
  const Gradients g = validated_gradients(gradients, p, Contents::read);
  run({p, g}, workspace, workspace_bytes);
}

}  // namespace
}  // namespace tilewise::capi

using namespace tilewise;

tilewise_status tilewise_plan(const tilewise_attention* attention,
                              const tilewise_gradients* gradients, int32_t pass,
                              tilewise_plan_info* plan) {
  return capi::guarded([&] { capi::plan(attention, gradients, pass, plan); });
}

tilewise_status tilewise_forward(const tilewise_attention* attention, void* workspace,
                                 int64_t workspace_bytes) {
  return capi::guarded([&] { capi::forward(attention, workspace, workspace_bytes); });
}

tilewise_status tilewise_backward(const tilewise_attention* attention,
                                  const tilewise_gradients* gradients, void* workspace,
                                  int64_t workspace_bytes) {
  return capi::guarded([&] { capi::backward(attention, gradients, workspace, workspace_bytes); });
}

tilewise_status tilewise_append_kv(const tilewise_kv_append* append) {
  return capi::guarded([&] {
    const tilewise_kv_append validated = capi::validated_append(append);
    if (validated.device == TILEWISE_CUDA) {
      capi::gpu_of(validated.device_index);
      capi::on_gpu([&] {
        if (validated.check != 0) capi::check_entries_of_gpu(validated);
        cuda::append_kv(validated);
      });
    } else {
      cpu::append_kv(validated, make_parallel(validated.parallel));
    }
  });
}
