#include "cuda/wgmma/plan.h"

#include "cuda/arch/hopper.h"
#include "cuda/common/dbias.h"
#include "cuda/plan_shape.h"
#include "cuda/wgmma/transposed_values.h"
#include "cuda/workspace.h"

namespace tilewise::cuda::wgmma {
namespace {

// Whether the number of keys grows linearly from tile to tile, for bands with one limit. It does
// not if more rows than a tile has attend to no key or to all keys; paired waves would then be
// slower than dynamic scheduling (simulated: by 1 to 3 % up to one tile of such rows, by 21 % with
// twice as many rows as keys).
bool tiles_grow_evenly(const Problem& p, int64_t rows_of_tile) {
  const int64_t more_rows = max_rows(p) - max_keys(p);
  const int64_t equal_rows = p.window_right >= 0 ? max(more_rows, p.window_right)
                                                 : more_rows + min(p.window_left, max_keys(p));
  return equal_rows <= rows_of_tile;
}

// Whether CTAs take pairs of tiles wave by wave: causal masks whose tile lengths follow from the
// shape.
bool uses_paired_waves(const Problem& p, const Plan& plan) {
  return p.mask == nullptr && plan.order.longest_tile != LongestTile::none &&
         has_uniform_sequences(p) && tiles_grow_evenly(p, plan.tile_q / plan.pack) &&
         plan.splits == 1;
}

// Cost of a Stream-K tail, in multiply-adds of one SM: a fixed part for prologues, epilogues and
// the combine kernel (H200: 6 us), and a part per element of the partial results (0.4 us per MB).
constexpr int64_t kStreamKFixedCost = int64_t{16} << 20;
constexpr int64_t kStreamKCostPerElement = 5;

// Shares the tiles of a partial last wave if that saves more time than it costs. Only the fast path
// does so, with uniform lengths and no mask, where all tiles have the same number of key tiles.
StreamKTail choose_stream_k_tail(const Problem& p, const Plan& plan, const Gpu& gpu) {
  const int64_t blocks = plan.tiles;
  const bool uniform = p.window_left < 0 && p.window_right < 0 && has_uniform_sequences(p);
  if (plan.form != Form::plain || plan.pack > 1 || !uniform || p.batch_invariant != 0 ||
      p.num_splits > 0)
    return {};
  const int64_t sms = gpu.sm_count;
  const int64_t tail_tiles = blocks % sms;
  const int64_t key_tiles = ceil_div(p.seqlen_k, plan.tile_k);
  if (tail_tiles == 0 || key_tiles == 0 || tail_tiles * key_tiles > INT32_MAX) return {};
  // So few tiles need key splits instead, because even the largest number of shares leaves SMs
  // idle.
  if (blocks * (StreamKTail::kMaxShares - 1) < sms) return {};
  // A tile may begin and end inside a share, so it has one share more than the quotient.
  const int64_t share = max(ceil_div(tail_tiles * key_tiles, sms),
                            ceil_div(key_tiles, int64_t{StreamKTail::kMaxShares - 1}));
  StreamKTail tail;
  tail.tiles = static_cast<int32_t>(tail_tiles);
  tail.first = static_cast<int32_t>(blocks - tail_tiles);
  tail.key_tiles = static_cast<int32_t>(key_tiles);
  tail.key_tiles_per_cta = static_cast<int32_t>(share);
  tail.columns = plan.kernel_set->head_dim_v;
  const int64_t macs_per_key_tile =
      plan.tile_q * plan.tile_k * (plan.kernel_set->head_dim + tail.columns);
  const int64_t partial_elements = int64_t{tail.num_results()} * plan.tile_q * tail.columns;
  const bool pays = (key_tiles - share) * macs_per_key_tile >=
                    kStreamKFixedCost + kStreamKCostPerElement * partial_elements;
  return pays ? tail : StreamKTail{};
}

// Tile order for deterministic dQ sums. Without a causal mask the loops of all key tiles
// begin at row 0, so the tiles of a head proceed one semaphore wait (one or two steps) apart. CTAs
// that start together therefore compute tiles of many heads: as many heads as fill the GPU with all
// of their tiles. With a causal mask, each key tile begins at its own rows, and if the last tile
// starts first, no tile has to wait at its beginning. Kernels that split columns hold the semaphore
// for most of a step, so they are faster with few tiles of a head at once. (Speed relative to
// non-deterministic sums, D128, 4k rows, full and causal: 0.90 and 0.82; head by head or from the
// first tile 0.71 and 0.72.)
void order_for_semaphores(Plan& plan, const Problem& p, const Gpu& gpu) {
  TileOrder& order = plan.order;
  const bool by_columns = !plan.kernel_set->persistent_backward;
  if (by_columns && p.window_right >= 0) return;
  order.longest_tile = p.window_right >= 0 ? LongestTile::last : LongestTile::first;
  const int64_t resident_clusters = gpu.sm_count / plan.kernel_set->backward_tile.cluster_size;
  order.interleave_heads(ceil_div(resident_clusters, max<int64_t>(1, order.tiles)));
}

void choose_backward_order(Plan& plan, const Problem& p, const Gpu& gpu) {
  // 8 heads are 1.00 to 1.05 times as fast as 16 or more, with GQA up to 1.19 times; 4 heads are no
  // better.
  constexpr int64_t kMaxHeadGroup = 8;
  if (plan.order.longest_tile != LongestTile::none)
    plan.order.interleave_heads(min(heads_in_l2(p, plan, gpu), kMaxHeadGroup));
  if (p.deterministic != 0) order_for_semaphores(plan, p, gpu);
}

// An upper bound of the grid of the prepare kernel, which has CTAs for tiles of keys and of rows.
int64_t largest_grid(const Request& request, const Plan& plan) {
  const Size keys = Size(plan.blocks) * plan.kernel_set->backward_tile.cluster_size;
  const Size rows = Size(row_blocks(request.problem, plan)) * plan.kernel_set->prepare_splits;
  return max((keys + rows).value(), common::dbias_blocks(request.problem, request.gradients));
}

}  // namespace

Plan plan_forward(const Problem& p, const KernelSet& kernel_set, const Gpu& gpu) {
  Plan plan = plan_forward_tiles(p, kernel_set, gpu);
  if (!plan.can_be_launched()) return plan;
  // The masked form and that of float8 do not split keys (`why_no_masked_form`, `why_no_float8`).
  const bool float8 = dtypes_of(p).q == TILEWISE_FLOAT8_E4M3;
  const bool may_split = plan.form != Form::masked && !float8;
  if (may_split) plan.stream_k = choose_stream_k_tail(p, plan, gpu);
  if (may_split && !plan.stream_k.any()) plan_key_splits(plan, p, gpu);
  plan_forward_grid(plan, p, gpu);
  if (!plan.can_be_launched()) return plan;
  // The fast path has no code for packed heads and splits: even code that a launch does not run
  // makes it slower.
  if (plan.pack > 1 || plan.splits > 1) plan.form = Form::general;
  if (uses_paired_waves(p, plan)) {
    plan.order.pair_tiles_for_waves(gpu.sm_count);
  } else if (plan.blocks > gpu.sm_count) {
    // If tiles may differ in length, CTAs that finish early take the next one from a counter.
    plan.dynamic_scheduling = is_varlen_q(p) || nan_may_leak(p);
  }
  plan.rows_per_recompute = arch::WgmmaForwardTile::kRowsPerWarp;
  if (float8) plan.value_bytes = TransposedValues{p}.bytes();
  finish_forward_plan(plan, p, gpu);
  return plan;
}

BackwardRegions backward_regions(const Request& request, const Plan& plan) {
  const Problem& p = request.problem;
  Workspace workspace;
  BackwardRegions regions;
  const int64_t row_tiles = row_blocks(p, plan);
  const int64_t rows = row_tiles * plan.tile_q;
  if (plan.form == Form::general) regions.far_rows = take_far_rows(workspace, rows);
  regions.row_lse = workspace.take<float>(rows);
  regions.dq_sum = workspace.take<float>(Size(rows) * plan.head_dim);
  regions.descriptors = workspace.take<TileDescriptor>(Size(plan.blocks) *
                                                       plan.kernel_set->backward_tile.cluster_size);
  // In semaphore order a CTA waits for CTAs of earlier tiles, which might not start while another
  // CTA computes a second tile, so the grid is not persistent. The CTAs of a cluster start
  // together.
  const bool persistent = plan.kernel_set->persistent_backward && p.deterministic == 0;
  if (persistent) regions.tile_counter = workspace.take<int32_t>(1);
  if (p.deterministic != 0) regions.dq_semaphores = workspace.take<int32_t>(row_tiles);
  take_shared_regions(regions, workspace, request, plan);
  return regions;
}

Plan plan_backward(const Request& request, const KernelSet& kernel_set, const Gpu& gpu,
                   const KernelSet* nan_recompute) {
  Plan plan = plan_backward_tiles(request, kernel_set);
  choose_backward_order(plan, request.problem, gpu);
  plan.grid = largest_grid(request, plan);
  if (!plan.can_be_launched()) return plan;
  plan.nan_recompute = nan_recompute;
  plan.workspace_bytes = backward_regions(request, plan).bytes;
  return plan;
}

}  // namespace tilewise::cuda::wgmma
