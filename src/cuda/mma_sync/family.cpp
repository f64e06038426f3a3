#include "cuda/mma_sync/family.h"

#include "cuda/arch/limits.h"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "cuda/mma_sync/instances.h"
#include "cuda/plan_shape.h"
#include "cuda/workspace.h"

namespace tilewise::cuda::mma_sync {
namespace {

struct BackwardRegions : BackwardWorkspace {
  Region row_lse;
  FarRowRegions far_rows;
  Region dq_sum;
};

int32_t table(const Gpu& gpu) { return arch::table_of(gpu.sm, gpu.table); }

struct SecondRegions : BackwardWorkspace {
  Region row_second_delta;  // as in SecondParams
  Region row_minus_lse;
  Region row_minus_low;
  Region row_lse_tangent;
};

// Why not Pass::jvp or Pass::second, whose kernels are the fast path alone.
WhyNot why_no_tangents(const Request& request, const Gpu& gpu) {
  const Problem& p = request.problem;
  const int32_t kv = request.dtypes.kv;
  if (kv != TILEWISE_FLOAT16 && kv != TILEWISE_BFLOAT16)
    return {.text = "it has jvp and second for float16 and bfloat16 alone"};
  if (table(gpu) == arch::Sm75::kTable) return {.text = "its jvp and second need sm_80"};
  if (max(p.head_dim, p.head_dim_v) > kTangentHeadDims.back())
    return {.text = "its jvp and second take head dimensions up to 128"};
  if (is_general(p) || p.mask != nullptr)
    return {.text = "its jvp and second take no softcap, ALiBi slopes, bias, dropout or mask"};
  if (request.gradients.dscale != nullptr)
    return {.text = "its second has no gradient of the scale"};
  if (const WhyNot why = why_no_other_out(request)) return why;
  if (!fits_plain(request))
    return {.text = "its jvp and second need rows of tensors that start at multiples of 16 bytes"};
  return {};
}

// Why not head dimensions that only latent caches have (LatentConfig).
WhyNot why_no_latent_forward(const Request& request) {
  const Problem& p = request.problem;
  if (!values_are_in_keys(p) || p.head_dim_v > kLatentHeadDimV)
    return {.text =
                "its head dimensions above 512 need values that are the first 512 columns of "
                "the keys, or fewer"};
  if (is_general(p) || p.mask != nullptr || request.dtypes.out != request.dtypes.q)
    return {.text =
                "its head dimensions above 512 take no softcap, ALiBi slopes, bias, dropout, "
                "mask or out of another dtype"};
  if (!rows_are_aligned(request))
    return {.text =
                "its head dimensions above 512 need rows of tensors that start at multiples of "
                "16 bytes"};
  if (p.block_table != nullptr && !pages_fit_32_bits(p))
    return {.text = "its head dimensions above 512 take paged caches up to 16 GB"};
  return {};
}

// Why not head dimensions whose columns several warps divide (forward_column_warps.h,
// backward_column_warps.cuh).
WhyNot why_no_wide(const Request& request, const Gpu& gpu) {
  if (max(request.problem.head_dim, request.problem.head_dim_v) <= kHalfHeadDims.back()) return {};
  if (request.dtypes.kv == TILEWISE_FLOAT8_E4M3)
    return {.text = "its kernels for keys of float8 take head dimensions up to 256"};
  if (table(gpu) == arch::Sm75::kTable)
    return {.text = "its kernels for sm_75 take head dimensions up to 256"};
  if (request.is(Pass::backward) && !has_wide_backward(table(gpu)))
    return {.text =
                "its backward for GPUs with 99 KB of shared memory per CTA takes head "
                "dimensions up to 256"};
  if (max(request.problem.head_dim, request.problem.head_dim_v) <= kWideHeadDims.back()) return {};
  return why_no_latent_forward(request);
}

// The columns of one step of an fp32 product. Tensor cores truncate sums, and with fewer columns
// these errors do not cancel: with one column the error was 1.1 times the bound of fp32.
constexpr int64_t kLeastFloatColumns = 8;

WhyNot why_not(const Request& request, const Gpu& gpu) {
  if (request.is(Pass::jvp) || request.is(Pass::second)) return why_no_tangents(request, gpu);
  if (const WhyNot why = why_no_max_logits(request)) return why;
  const int32_t kv = request.dtypes.kv;
  if (request.problem.mask != nullptr && kv == TILEWISE_FLOAT32)
    return {.text = "it reads a mask only with keys of 16 or 8 bits"};
  if (table(gpu) == arch::Sm75::kTable && kv != TILEWISE_FLOAT16 && kv != TILEWISE_FLOAT8_E4M3)
    return {.text = "the tensor cores of sm_75 compute no ", .detail = short_dtype(kv)};
  const Problem& p = request.problem;
  if (kv == TILEWISE_FLOAT32 && p.tf32 == 0 && min(p.head_dim, p.head_dim_v) < kLeastFloatColumns)
    return {.text = "its float32 needs head dimensions of 8 and more"};
  return why_no_wide(request, gpu);
}

// The kernels are compiled per element type of the keys; those for float8 serve both 16-bit types
// of q.
const KernelSet* find_in_table(const Request& request, int32_t table, const Target& target) {
  KernelQuery query = {
      .family = &kFamily, .table = table, .dtype = request.dtypes.kv, .tf32 = true};
  if (request.problem.tf32 != 0) {
    const KernelSet* kernel_set = find_kernels(request, query, target);
    if (kernel_set != nullptr) return kernel_set;
  }
  query.tf32 = false;
  return find_kernels(request, query, target);
}

// In the GPU's table or, if the build lacks that, in the nearest lower one that serves the request.
const KernelSet* find(const Request& request, const Target& target) {
  const int32_t first = table(target.gpu);
  const KernelSet* kernel_set = find_in_table(request, first, target);
  if (target.gpu.table != 0 || target.registry.runs(first, target.gpu.sm)) return kernel_set;
  for (auto row = arch::kLimits.rbegin(); kernel_set == nullptr && row != arch::kLimits.rend();
       ++row) {
    if (row->table == row->sm && row->table < first)
      kernel_set = find_in_table(request, row->table, target);
  }
  return kernel_set;
}

Plan plan_forward(const Problem& p, const KernelSet& large, const Gpu& gpu,
                  const KernelSet* nan_recompute) {
  const bool few_rows = selection_rows(p) * group_size(p) <= kDecodeRows;
  Plan plan = plan_forward_tiles(p, few_rows ? *with_few_rows(large, p, gpu) : large, gpu);
  if (!plan.can_be_launched()) return plan;
  plan_key_splits(plan, p, gpu);
  plan_forward_grid(plan, p, gpu);
  if (!plan.can_be_launched()) return plan;
  plan.nan_recompute = nan_recompute;
  finish_forward_plan(plan, p, gpu);
  return plan;
}

// The tiles of a forward, each with all of its keys.
Plan plan_jvp(const Problem& p, const KernelSet& kernel_set, const Gpu& gpu,
              const KernelSet* nan_recompute) {
  Plan plan = plan_forward_tiles(p, kernel_set.of_tangents(), gpu);
  if (!plan.can_be_launched()) return plan;
  plan_forward_grid(plan, p, gpu);
  plan.nan_recompute = nan_recompute;
  if (plan.can_be_launched()) finish_forward_plan(plan, p, gpu);
  return plan;
}

BackwardRegions backward_regions(const Request& request, const Plan& plan) {
  Workspace workspace;
  BackwardRegions regions;
  const int64_t row_tiles = row_blocks(request.problem, plan);
  const int64_t rows = row_tiles * plan.tile_q;
  regions.far_rows = take_far_rows(workspace, rows);
  regions.row_lse = workspace.take<float>(rows);
  regions.dq_sum = workspace.take<float>(Size(rows) * plan.head_dim);
  if (request.problem.deterministic != 0)
    regions.dq_semaphores = workspace.take<int32_t>(row_tiles);
  take_shared_regions(regions, workspace, request, plan);
  return regions;
}

Plan plan_backward(const Request& request, const KernelSet& kernel_set, const Gpu& gpu,
                   const KernelSet* nan_recompute) {
  Plan plan = plan_backward_tiles(request, kernel_set);
  interleave_backward_heads(plan, request.problem, gpu);
  plan_backward_grid(plan, request);
  if (!plan.can_be_launched()) return plan;
  plan.nan_recompute = nan_recompute;
  plan.workspace_bytes = backward_regions(request, plan).bytes;
  return plan;
}

SecondRegions second_regions(const Request& request, const Plan& plan) {
  Workspace workspace;
  SecondRegions regions;
  take_shared_regions(regions, workspace, request, plan);
  const int64_t rows = row_blocks(request.problem, plan) * plan.tile_q;
  for (Region* region : {&regions.row_second_delta, &regions.row_minus_lse, &regions.row_minus_low,
                         &regions.row_lse_tangent})
    *region = workspace.take<float>(rows);
  regions.bytes = workspace.bytes();
  return regions;
}

Plan plan_second(const Request& request, const KernelSet& kernel_set, const Gpu& gpu,
                 const KernelSet* nan_recompute) {
  Plan plan = plan_backward_tiles(request, kernel_set.of_tangents());
  interleave_backward_heads(plan, request.problem, gpu);
  plan_backward_grid(plan, request);
  plan.nan_recompute = nan_recompute;
  if (plan.can_be_launched()) plan.workspace_bytes = second_regions(request, plan).bytes;
  return plan;
}

Plan plan(const Request& request, const Target& target) {
  const KernelSet* kernel_set = find(request, target);
  if (kernel_set == nullptr) return {};
  const KernelSet* nan_recompute = nullptr;
  // With tangents, the products of weights and tangents of scores may also overflow fp16.
  const bool has_tangents = request.is(Pass::jvp) || request.is(Pass::second);
  const bool overflows = has_tangents && request.dtypes.kv == TILEWISE_FLOAT16;
  if (overflows || nan_may_leak(request.problem)) {
    nan_recompute = find_recompute_kernels(request, target);
    if (nan_recompute == nullptr) return {};
  }
  switch (request.pass) {
    case Pass::forward:
      return plan_forward(request.problem, *kernel_set, target.gpu, nan_recompute);
    case Pass::backward:
      return plan_backward(request, *kernel_set, target.gpu, nan_recompute);
    case Pass::jvp:
      return plan_jvp(request.problem, *kernel_set, target.gpu, nan_recompute);
    case Pass::second:
      return plan_second(request, *kernel_set, target.gpu, nan_recompute);
  }
  return {};
}

// Launches a decode kernel that loads K and V by TMA, with one CTA per tile and split or chunk.
void launch_tma_decode(const Problem& p, const Plan& plan, const ForwardParams& main, Start start) {
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = main;
  const bool paged = plan.form == Form::tma_paged;
  const auto box_rows =
      static_cast<int32_t>(paged ? min<int64_t>(p.page_size, plan.tile_k) : plan.tile_k);
  const auto map = paged ? map_of_pages : map_of_keys;
  params.k = map(p, p.k, p.head_dim, box_rows);
  params.v = map(p, p.v, p.head_dim_v, box_rows);
  params.stages = plan.stages;
  params.k_tail = map(p, p.k, p.head_dim, kTailBoxRows);
  params.v_tail = map(p, p.v, p.head_dim_v, kTailBoxRows);
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  cuda::launch(plan.warps_per_tile > 1 ? kernels.tma_forward_warp_split : kernels.tma_forward,
               plan.blocks, p.stream, params, start, plan.cluster_size);
}

void launch_forward(const Problem& p, const Plan& plan, void* workspace) {
  ForwardLaunch forward(p, plan, workspace);
  const FormKernels& kernels = forward.kernels();
  if (kernels.tma_forward.function != nullptr) {
    launch_tma_decode(p, plan, forward.params, forward.start);
  } else {
    cuda::launch(plan.warps_per_tile > 1 ? kernels.forward_warp_split : kernels.forward,
                 plan.blocks, p.stream, forward.params, forward.start, plan.cluster_size);
  }
  forward.finish();
}

// The kernel of the keys also sums dQ.
void launch_backward(const Request& request, const Plan& plan, void* workspace) {
  const BackwardRegions regions = backward_regions(request, plan);
  BackwardLaunch backward(request, plan, regions, workspace);
  BackwardParams& params = backward.params;
  params.row_lse = regions.row_lse.in<float>(workspace);
  set_far_rows(params, regions.far_rows, workspace);
  params.dq_sum = regions.dq_sum.in<float>(workspace);
  const Stream stream = request.problem.stream;
  const int64_t row_tiles = row_blocks(request.problem, plan);
  if (backward.keys() || backward.rows()) {
    cuda::launch(backward.kernels().prepare, row_tiles, stream, params);
    cuda::launch(backward.kernels().backward, plan.blocks, stream, params);
  }
  if (backward.rows()) cuda::launch(backward.kernels().finish, row_tiles, stream, params);
  backward.finish();
}

// One kernel computes dK and dV, another dQ.
void launch_second(const Request& request, const Plan& plan, void* workspace) {
  const SecondRegions regions = second_regions(request, plan);
  const BackwardLaunch second(request, plan, regions, workspace);
  SecondParams params{second.params, request.tangents};
  params.row_second_delta = regions.row_second_delta.in<float>(workspace);
  params.row_minus_lse = regions.row_minus_lse.in<float>(workspace);
  params.row_minus_low = regions.row_minus_low.in<float>(workspace);
  params.row_lse_tangent = regions.row_lse_tangent.in<float>(workspace);
  second.launch_second(params);
}

}  // namespace

constexpr FamilyRow kFamily = {
    .facts = {.name = "cuda.mma_sync",
              .requires_ = "tensor cores: sm_75 for float16, sm_80 for bfloat16 and float32",
              .dtypes = kFloatDtypes,
              .passes = PassSet::of(Pass::forward, Pass::backward, Pass::jvp, Pass::second),
              .tangent_dtypes = kHalfDtypes,
              .max_head_dim = kHalfHeadDims.back(),
              .max_forward_head_dim = kLatentHeadDim,
              .max_backward_head_dim = kWideHeadDims.back()},
    .sm = {.first = 75},
    .table = table,
    .why_not = why_not,
    .plan = plan,
    .launch = launch_pass<launch_forward, launch_backward, launch_jvp, launch_second>,
};

}  // namespace tilewise::cuda::mma_sync
