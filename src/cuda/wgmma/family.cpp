#include "cuda/wgmma/family.h"

#include <numeric>

#include "cuda/arch/hopper.h"
#include "cuda/launch.h"
#include "cuda/layout.h"
#include "cuda/plan_shape.h"
#include "cuda/wgmma/instances.h"
#include "cuda/wgmma/plan.h"
#include "cuda/wgmma/transposed_values.h"

namespace tilewise::cuda::wgmma {
namespace {

int32_t table(const Gpu&) { return arch::Sm90a::kTable; }

// Whether a forward has so few rows that most of a tile would be empty.
bool has_few_rows(const Problem& p) {
  constexpr int64_t kMaxFewRows = 64;
  return selection_rows(p) * group_size(p) <= kMaxFewRows;
}

// Whether a forward has so few rows that its tiles should share the heads of a group, or divide the
// keys among CTAs. The masked form does neither. mma_sync does, but takes longer for a tile, so its
// splits pay where half of the SMs would have no tile.
bool packs_or_splits(const Problem& p, const Gpu& gpu) {
  constexpr int64_t kMaxPackedRows = 256;
  constexpr int64_t kRows = 128;
  constexpr int64_t kMinSplitKeys = 2048;
  if (p.num_splits > 1 || (group_size(p) > 1 && selection_rows(p) <= kMaxPackedRows)) return true;
  const Size tiles = max_tiles(is_varlen_q(p), p.seqlen_q, max_rows(p), p.batch, kRows) * p.heads_q;
  return tiles.value() < gpu.sm_count / 2 && max_keys(p) >= kMinSplitKeys;
}

// Why the masked form does not serve a request with a mask.
WhyNot why_no_masked_form(const Request& request, const Gpu& gpu) {
  const Problem& p = request.problem;
  if (max(p.head_dim, p.head_dim_v) > arch::Sm90a::kMaxMaskedHeadDim)
    return {.text = "it reads a mask with head dims up to 128"};
  if (is_general(p) || p.block_table != nullptr || request.dtypes.out != request.dtypes.q)
    return {.text = "beside a mask it has no score option, pages or out in float32"};
  if (request.is(Pass::forward) && packs_or_splits(p, gpu))
    return {.text = "needs more rows beside a mask: it then neither packs heads nor splits keys",
            .would_be_faster = false};
  return {};
}

// Why the form for float8 does not serve a request with float8 keys.
WhyNot why_no_float8(const Request& request, const Gpu& gpu) {
  const Problem& p = request.problem;
  if (request.dtypes.q != TILEWISE_FLOAT8_E4M3) return {.text = "TMA does not convert float8"};
  if (p.head_dim_v > kFloat8HeadDims.back().v)
    return {.text = "its tiles of float8 have at most 128 columns of values"};
  if (p.mask != nullptr || is_general(p) || p.block_table != nullptr ||
      request.dtypes.out == TILEWISE_FLOAT32)
    return {.text = "for float8 it has no score option, mask, pages or out in float32"};
  if (TransposedValues{p}.columns() > INT32_MAX)
    return {.text = "its copy of float8 values has 2^31 columns or more"};
  if (packs_or_splits(p, gpu))
    return {.text = "needs more rows in float8: it then neither packs heads nor splits keys",
            .would_be_faster = false};
  return {};
}

WhyNot why_not(const Request& request, const Gpu& gpu) {
  const Problem& p = request.problem;
  const bool forward = request.is(Pass::forward);
  const bool float8 = request.dtypes.kv == TILEWISE_FLOAT8_E4M3;
  if (p.mask != nullptr && !float8) {
    if (const WhyNot why = why_no_masked_form(request, gpu)) return why;
  }
  if (const WhyNot why = why_no_max_logits(request)) return why;
  if (forward && has_few_rows(p))
    return {.text = "needs more rows: its tiles have 64", .would_be_faster = false};
  if (gpu.table != 0) return {.text = "a tile table is forced"};  // of another family
  if (float8) {
    if (const WhyNot why = why_no_float8(request, gpu)) return why;
  }
  if (forward && p.batch_invariant != 0)
    return {.text = "batch_invariant needs one kernel for all lengths"};
  if (!rows_are_aligned(request))
    return {.text =
                "TMA needs rows that start at multiples of 16 bytes and head dims that are "
                "multiples of 8, in float8 of 16"};
  // kMinTmaPageRows divides every key tile; a box has the largest number of rows that divides both
  // the tile and the page.
  const bool paged = p.block_table != nullptr;
  if (forward && paged && p.page_size % kMinTmaPageRows != 0)
    return {.text = "TMA needs pages of a multiple of 16 keys"};
  if (forward && paged && !pages_are_mappable(p))
    return {.text = "TMA needs pages with strides below 2^40 bytes and without left padding"};
  const bool mappable = rows_are_mappable(p, p.q) &&
                        (forward || rows_are_mappable(p, request.gradients.dout)) &&
                        (paged || keys_are_mappable(p));
  if (!mappable) return {.text = "TMA needs strides that are not negative and below 2^40 bytes"};
  return {};
}

bool prefers_small_tiles(const Request& request, const KernelSet& kernel_set) {
  const Problem& p = request.problem;
  const int64_t rows = selection_rows(p);
  if (request.is(Pass::forward)) {
    if (p.mask == nullptr) return arch::Sm90a::prefers_small_forward(rows, nan_may_leak(p));
    return arch::Sm90a::prefers_small_masked_forward(rows, p.mask->kind == TILEWISE_MASK_BLOCKS);
  }
  // The masked form has the tiles of the general one.
  const bool general = !fits_plain(request) || p.mask != nullptr;
  return arch::Sm90a::prefers_small_backward(kernel_set.head_dim, rows, nan_may_leak(p), general);
}

const KernelSet* find(const Request& request, const Target& target) {
  const KernelSet* large = find_kernels(
      request, {.family = &kFamily, .table = table(target.gpu), .dtype = request.dtypes.q}, target);
  if (large == nullptr || !prefers_small_tiles(request, *large)) return large;
  return with_few_rows(*large, request, target.gpu);
}

Plan plan(const Request& request, const Target& target) {
  const KernelSet* kernel_set = find(request, target);
  if (kernel_set == nullptr) return {};
  const bool forward = request.is(Pass::forward);
  const bool reads_mask =
      forward ? kernel_set->reads_mask_forward() : kernel_set->reads_mask_backward();
  if (request.problem.mask != nullptr && !reads_mask) return {};
  // The forward recomputes at its own end the rows that a NaN may contaminate (nan_recompute.h).
  if (forward) return plan_forward(request.problem, *kernel_set, target.gpu);
  const KernelSet* nan_recompute = nullptr;
  if (nan_may_leak(request.problem)) {
    nan_recompute = find_recompute_kernels(request, target);
    if (nan_recompute == nullptr) return {};
  }
  return plan_backward(request, *kernel_set, target.gpu, nan_recompute);
}

// Launches the kernel that transposes values of float8 to `to`, and returns their map.
TensorMap transposed_values(const Problem& p, const Plan& plan, uint8_t* to) {
  const TransposedValues values{p};
  cuda::launch(plan.kernel_set->plain.transpose_values,
               values.batches() * values.tiles() * p.heads_kv, p.stream,
               TransposeParams{.problem = p, .to = to});
  return map_of_transposed_values(p, to, values.batches(), values.columns(),
                                  plan.kernel_set->head_dim_v);
}

// Launches a persistent kernel: one CTA per SM, which computes many tiles. `transposed`: memory for
// values of float8, or null.
void launch_persistent(const Problem& p, const Plan& plan, const ForwardParams& main,
                       int32_t* counter, int32_t* recompute_list, uint8_t* transposed) {
  constexpr int32_t kRowsOfWarpgroup = 64;
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = main;
  params.q = map_of_rows(p, p.q, p.head_dim, kRowsOfWarpgroup);
  int32_t box_rows = plan.tile_k;
  if (p.block_table != nullptr)
    params.page_box_rows = box_rows =
        static_cast<int32_t>(std::gcd(p.page_size, int64_t{plan.tile_k}));
  const auto map = p.block_table != nullptr ? map_of_pages : map_of_keys;
  params.k = map(p, p.k, p.head_dim, box_rows);
  params.v = transposed != nullptr ? transposed_values(p, plan, transposed)
                                   : map(p, p.v, p.head_dim_v, box_rows);
  const bool follows = counter != nullptr || transposed != nullptr;
  params.num_tiles = static_cast<int32_t>(plan.stream_k.any() ? plan.stream_k.first : plan.blocks);
  params.tile_counter = counter;
  params.recompute_list = recompute_list;
  params.nan_may_leak = nan_may_leak(p);
  const int64_t sms = gpu(p.device_index).sm_count;
  const int64_t grid = plan.stream_k.any() ? sms : min(plan.blocks, sms);
  cuda::launch(plan.kernel_set->form(plan.form).tma_forward, grid, p.stream, params,
               follows ? Start::dependent : Start::in_order);
}

// Launches a kernel for tile descriptors and row statistics, and one for dK, dV and the dQ sums.
void launch_keys(const Problem& p, const Plan& plan, const BackwardParams& main) {
  const int32_t cluster = plan.kernel_set->backward_tile.cluster_size;
  TmaBackwardParams params;
  static_cast<BackwardParams&>(params) = main;
  params.q = map_of_rows(p, p.q, p.head_dim, plan.tile_q);
  params.dout = map_of_rows(p, main.gradients.dout, p.head_dim_v, plan.tile_q);
  params.k = map_of_keys(p, p.k, p.head_dim, plan.tile_k / cluster);
  params.v = map_of_keys(p, p.v, p.head_dim_v, plan.tile_k / cluster);
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  const int64_t descriptor_ctas = ceil_div(plan.blocks * cluster, kernels.prepare.threads);
  cuda::launch(kernels.prepare,
               descriptor_ctas + row_blocks(p, plan) * plan.kernel_set->prepare_splits, p.stream,
               main);
  const int64_t grid = params.tile_counter == nullptr
                           ? plan.blocks * cluster
                           : min<int64_t>(plan.blocks, gpu(p.device_index).sm_count);
  cuda::launch(kernels.tma_backward, grid, p.stream, params, Start::dependent);
}

void launch_forward(const Problem& p, const Plan& plan, void* workspace) {
  ForwardLaunch forward(p, plan, workspace);
  launch_persistent(p, plan, forward.params, forward.regions.tile_counter.in<int32_t>(workspace),
                    forward.regions.recompute_list.in<int32_t>(workspace),
                    forward.regions.values.in<uint8_t>(workspace));
  forward.finish();
}

void launch_backward(const Request& request, const Plan& plan, void* workspace) {
  const BackwardRegions regions = backward_regions(request, plan);
  BackwardLaunch backward(request, plan, regions, workspace);
  BackwardParams& params = backward.params;
  params.row_lse = regions.row_lse.in<float>(workspace);
  set_far_rows(params, regions.far_rows, workspace);
  params.dq_sum = regions.dq_sum.in<float>(workspace);
  params.descriptors = regions.descriptors.in<TileDescriptor>(workspace);
  params.tile_counter = regions.tile_counter.in<int32_t>(workspace);
  if (backward.keys() || backward.rows()) launch_keys(backward.problem, plan, params);
  if (backward.rows()) {
    cuda::launch(backward.kernels().finish, row_blocks(backward.problem, plan),
                 backward.problem.stream, params, Start::dependent);
  }
  backward.finish();
}

}  // namespace

constexpr FamilyRow kFamily = {
    .facts = {.name = "cuda.wgmma",
              .requires_ = "Hopper, sm_90",
              .dtypes = DtypeSet::of(TILEWISE_FLOAT16, TILEWISE_BFLOAT16, TILEWISE_FLOAT8_E4M3),
              .passes = PassSet::of(Pass::forward, Pass::backward),
              .max_head_dim = kHeadDims.back().qk,
              .max_float8_head_dim = kFloat8HeadDims.back().qk},
    .sm = {.first = 90, .last = 90},
    .table = table,
    .why_not = why_not,
    .plan = plan,
    .launch = launch_pass<launch_forward, launch_backward>,
};

}  // namespace tilewise::cuda::wgmma
