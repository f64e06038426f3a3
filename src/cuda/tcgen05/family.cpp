#include "cuda/tcgen05/family.h"

#include "cuda/arch/blackwell.h"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "cuda/plan_shape.h"
#include "cuda/tcgen05/instances.h"

namespace tilewise::cuda::tcgen05 {
namespace {

int32_t table(const Gpu&) { return arch::Sm100a::kTable; }

// Whether most rows of a tile would be empty, or the heads of a group should share a tile.
bool has_few_rows(const Problem& p) {
  constexpr int64_t kMaxFewRows = 64;
  const int64_t rows = selection_rows(p);
  return rows * group_size(p) <= kMaxFewRows ||
         (group_size(p) > 1 && rows <= arch::Sm100a::forward(kHeadDims.back()).rows());
}

WhyNot why_not(const Request& request, const Gpu& gpu) {
  const Problem& p = request.problem;
  if (const WhyNot why = why_no_mask(request)) return why;
  if (const WhyNot why = why_no_max_logits(request)) return why;
  if (const WhyNot why = why_no_other_out(request)) return why;
  if (has_few_rows(p))
    return {.text = "needs more rows: its tiles have 256 rows of one head",
            .would_be_faster = false};
  if (gpu.table != 0) return {.text = "a tile table is forced"};  // of another family
  if (request.dtypes.kv == TILEWISE_FLOAT8_E4M3) return {.text = "TMA does not convert float8"};
  if (p.batch_invariant != 0) return {.text = "batch_invariant needs one kernel for all lengths"};
  if (p.num_splits > 1) return {.text = "one CTA computes all keys of a tile"};
  if (is_general(p)) return {.text = "it has no softcap, ALiBi slopes, bias or dropout"};
  if (p.block_table != nullptr) return {.text = "it has no loads of pages"};
  if (!rows_are_aligned(request))
    return {.text =
                "TMA needs rows that start at multiples of 16 bytes and head dims that are "
                "multiples of 8"};
  if (!rows_are_mappable(p, p.q) || !keys_are_mappable(p))
    return {.text = "TMA needs strides that are not negative and below 2^40 bytes"};
  return {};
}

// Rows whose result the sums do not determine (NaN of keys that the row does not see, scores beyond
// the range of the exponents) are flagged and recomputed, so every plan has a recompute.
Plan plan(const Request& request, const Target& target) {
  const Problem& p = request.problem;
  const KernelSet* kernel_set = find_kernels(
      request, {.family = &kFamily, .table = table(target.gpu), .dtype = request.dtypes.q}, target);
  if (kernel_set == nullptr) return {};
  const KernelSet* nan_recompute = find_recompute_kernels(request, target);
  if (nan_recompute == nullptr) return {};
  Plan plan = plan_forward_tiles(p, *kernel_set, target.gpu);
  if (!plan.can_be_launched()) return plan;
  plan_forward_grid(plan, p, target.gpu);
  if (!plan.can_be_launched()) return plan;
  plan.nan_recompute = nan_recompute;
  finish_forward_plan(plan, p, target.gpu);
  return plan;
}

void launch(const Request& request, const Plan& plan, void* workspace) {
  const Problem& p = request.problem;
  ForwardLaunch forward(p, plan, workspace);
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = forward.params;
  params.q = map_of_rows(p, p.q, p.head_dim, arch::Tcgen05ForwardTile::kRows);
  params.k = map_of_keys(p, p.k, p.head_dim, plan.tile_k);
  params.v = map_of_keys(p, p.v, p.head_dim_v, plan.tile_k);
  cuda::launch(forward.kernels().tma_forward, plan.blocks, p.stream, params, forward.start);
  forward.finish();
}

}  // namespace

constexpr FamilyRow kFamily = {
    .facts = {.name = "cuda.tcgen05",
              .requires_ = "datacenter Blackwell, sm_100 or sm_103",
              .dtypes = kHalfDtypes,
              .passes = PassSet::of(Pass::forward),
              .max_head_dim = kHeadDims.back()},
    .sm = {.first = 100, .last = 103},
    .table = table,
    .why_not = why_not,
    .plan = plan,
    .launch = launch,
    .proved = false,
};

}  // namespace tilewise::cuda::tcgen05
