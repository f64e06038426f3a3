// The entry points plan, forward, backward, jvp, second and append: validate, decide, run. This
// file has no logic of its own.
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

// The structs of a call; those that its pass does not have are NULL.
struct Given {
  const tilewise_attention* attention;
  const tilewise_tangents* tangents = nullptr;
  const tilewise_gradients* gradients = nullptr;
};

// The structs of a call after validation.
struct Validated {
  Pass pass;
  Problem problem;
  Tangents tangents;
  Gradients gradients;

  Validated(const Given& given, Pass a_pass, Contents contents)
      : pass(a_pass), problem(validated_problem(given.attention, pass, contents)) {
    const bool has_tangents = pass == Pass::jvp || pass == Pass::second;
    const bool has_gradients = pass == Pass::backward || pass == Pass::second;
    require(has_gradients || given.gradients == nullptr, "gradients is given for the ",
            pass_name(pass), " pass: it must be NULL");
    tangents =
        has_tangents ? validated_tangents(given.tangents, problem, pass, contents) : kNoTangents;
    gradients = has_gradients ? validated_gradients(given.gradients, problem, pass, contents)
                              : kNoGradients;
  }
  Request request() const { return {problem, pass, gradients, tangents}; }
};

void plan(const Given& given, Pass pass, tilewise_plan_info* info) {
  check_struct_size(info, "plan");
  const Validated call(given, pass, Contents::unread);
  const int32_t threads = make_parallel(call.problem.parallel).threads;
  const bool texts = info->struct_size > offsetof(tilewise_plan_info, kernel);
  write_struct(describe(call.request(), device_of(call.problem, threads), texts), info);
}

void run(const Given& given, Pass pass, void* workspace, int64_t workspace_bytes) {
  const Validated call(given, pass, Contents::read);
  const Request request = call.request();
  const Parallel parallel = make_parallel(request.problem.parallel);
  const dispatch::Decision decision = decide(request, device_of(request.problem, parallel.threads));
  check_workspace(workspace, workspace_bytes, decision.workspace_bytes());
  on_gpu([&] { dispatch::launch(decision, request, workspace, parallel); });
}

}  // namespace
}  // namespace tilewise::capi

using namespace tilewise;

tilewise_status tilewise_plan(const tilewise_attention* attention,
                              const tilewise_gradients* gradients, int32_t pass,
                              tilewise_plan_info* plan) {
  return capi::guarded([&] {
    const Pass checked = capi::checked_pass(pass, Pass::forward, Pass::backward);
    capi::plan({.attention = attention, .gradients = gradients}, checked, plan);
  });
}

tilewise_status tilewise_plan_tangents(const tilewise_attention* attention,
                                       const tilewise_tangents* tangents,
                                       const tilewise_gradients* gradients, int32_t pass,
                                       tilewise_plan_info* plan) {
  return capi::guarded([&] {
    const Pass checked = capi::checked_pass(pass, Pass::jvp, Pass::second);
    capi::plan({attention, tangents, gradients}, checked, plan);
  });
}

tilewise_status tilewise_forward(const tilewise_attention* attention, void* workspace,
                                 int64_t workspace_bytes) {
  return capi::guarded(
      [&] { capi::run({.attention = attention}, Pass::forward, workspace, workspace_bytes); });
}

tilewise_status tilewise_backward(const tilewise_attention* attention,
                                  const tilewise_gradients* gradients, void* workspace,
                                  int64_t workspace_bytes) {
  return capi::guarded([&] {
    capi::run({.attention = attention, .gradients = gradients}, Pass::backward, workspace,
              workspace_bytes);
  });
}

tilewise_status tilewise_jvp(const tilewise_attention* attention, const tilewise_tangents* tangents,
                             void* workspace, int64_t workspace_bytes) {
  return capi::guarded([&] {
    capi::run({.attention = attention, .tangents = tangents}, Pass::jvp, workspace,
              workspace_bytes);
  });
}

tilewise_status tilewise_second(const tilewise_attention* attention,
                                const tilewise_tangents* tangents,
                                const tilewise_gradients* gradients, void* workspace,
                                int64_t workspace_bytes) {
  return capi::guarded([&] {
    capi::run({attention, tangents, gradients}, Pass::second, workspace, workspace_bytes);
  });
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
