#include "cuda/simt/family.h"

#include "cuda/common/dbias.h"
#include "cuda/launch.h"
#include "cuda/simt/instances.h"
#include "cuda/workspace.h"

namespace tilewise::cuda::simt {
namespace {

int32_t table(const Gpu&) { return kTables.front().number; }

WhyNot why_not(const Request&, const Gpu&) { return {}; }

// The kernels are compiled per element type of q; float8 keys are an option of them.
const KernelSet* find(const Request& request, const Target& target) {
  return find_kernels(
      request, {.family = &kFamily, .table = table(target.gpu), .dtype = request.dtypes.q}, target);
}

// A forward, or a jvp, which has the tiles of a forward and does not split their keys.
Plan plan_forward(const Request& request, const KernelSet& kernel_set, const Gpu& gpu) {
  const Problem& p = request.problem;
  Plan plan = plan_forward_tiles(p, kernel_set, gpu);
  if (!plan.can_be_launched()) return plan;
  if (request.is(Pass::forward)) plan_key_splits(plan, p, gpu);
  plan_forward_grid(plan, p, gpu);
  if (plan.can_be_launched()) finish_forward_plan(plan, p, gpu);
  return plan;
}

struct Regions : BackwardWorkspace {
  Region row_second_delta;  // SecondParams::row_second_delta
};

Regions backward_workspace(const Request& request, const Plan& plan) {
  Workspace workspace;
  Regions regions;
  take_shared_regions(regions, workspace, request, plan);
  if (!request.is(Pass::second)) return regions;
  regions.row_second_delta = workspace.take<float>(row_blocks(request.problem, plan) * plan.tile_q);
  regions.bytes = workspace.bytes();
  return regions;
}

// A backward or Pass::second, which has its tiles.
Plan plan_backward(const Request& request, const KernelSet& kernel_set, const Gpu& gpu) {
  Plan plan = plan_backward_tiles(request, kernel_set);
  interleave_backward_heads(plan, request.problem, gpu);
  plan_backward_grid(plan, request);
  if (plan.can_be_launched()) plan.workspace_bytes = backward_workspace(request, plan).bytes;
  return plan;
}

Plan plan(const Request& request, const Target& target) {
  const KernelSet* kernel_set = find(request, target);
  if (kernel_set == nullptr) return {};
  switch (request.pass) {
    case Pass::forward:
    case Pass::jvp:
      return plan_forward(request, *kernel_set, target.gpu);
    case Pass::backward:
    case Pass::second:
      return plan_backward(request, *kernel_set, target.gpu);
  }
  return {};
}

void launch_forward(const Problem& p, const Plan& plan, void* workspace) {
  ForwardLaunch forward(p, plan, workspace);
  cuda::launch(forward.kernels().forward, plan.blocks, p.stream, forward.params, forward.start);
  forward.finish();
}

// One kernel computes dK and dV, another dQ.
void launch_backward(const Request& request, const Plan& plan, void* workspace) {
  BackwardLaunch backward(request, plan, backward_workspace(request, plan), workspace);
  const Stream stream = request.problem.stream;
  const int64_t row_tiles = row_blocks(request.problem, plan);
  if (backward.keys()) {
    cuda::launch(backward.kernels().prepare, row_tiles, stream, backward.params);
    cuda::launch(backward.kernels().backward, plan.blocks, stream, backward.params);
  }
  if (backward.rows()) cuda::launch(backward.kernels().finish, row_tiles, stream, backward.params);
  backward.finish();
}

void launch_second(const Request& request, const Plan& plan, void* workspace) {
  const Regions regions = backward_workspace(request, plan);
  const BackwardLaunch second(request, plan, regions, workspace);
  second.launch_second(
      {second.params, request.tangents, regions.row_second_delta.in<float>(workspace)});
}

}  // namespace

constexpr FamilyRow kFamily = {
    .facts = {.name = "cuda.simt",
              .requires_ = "an NVIDIA GPU, sm_60",
              .dtypes = kFloatDtypes,
              .passes = PassSet::of(Pass::forward, Pass::backward, Pass::jvp, Pass::second),
              .max_head_dim = kHeadDims.back(),
              .max_forward_head_dim = kWideHeadDim},
    .sm = {.first = 60},
    .table = table,
    .why_not = why_not,
    .plan = plan,
    .launch = launch_pass<launch_forward, launch_backward, launch_jvp, launch_second>,
    // A masked key is not part of any sum of these kernels, so they may recompute flagged tiles.
    .recompute_kernels = find,
};

}  // namespace tilewise::cuda::simt
