// Planning of the backward: order of the key tiles, and workspace.
#include "cuda/common/check.h"
#include "cuda/common/dbias.h"
#include "cuda/common/prepare.h"
#include "cuda/common/scalar_gradients.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"
#include "cuda/workspace.h"

namespace tilewise::cuda {
namespace {

// Part of L2 for Q, dO and the dQ sums of interleaved heads: 40 of the 50 MB of an H200 measured
// best.
constexpr double kL2Fraction = 0.8;
// Minimum number of interleaved heads for mma_sync and simt. 8 heads reach 0.87 to 1.00 of the
// speed of 16.
constexpr int64_t kMinHeadGroup = 16;
// Maximum for wgmma. 8 heads are 1.00 to 1.05 times as fast as 16 or more, with GQA up to 1.19
// times; 4 heads are no better.
constexpr int64_t kMaxWgmmaHeadGroup = 8;

// TileOrder::longest_tile, by the rows that attend to a key tile: the first tiles are longest with
// a causal mask, the last ones with a left window alone. In semaphore order (deterministic) a key
// tile waits for the one before it, which therefore has to start first.
LongestTile longest_tile(const Problem& p) {
  if (p.window_right >= 0 && p.window_left < 0) return LongestTile::first;
  const bool last = p.window_left >= 0 && p.window_right < 0;
  return last && p.deterministic == 0 ? LongestTile::last : LongestTile::none;
}

// Number of heads to interleave, whose Q, dO and dQ sums fit in L2 together.
int64_t heads_in_l2(const Problem& p, const Plan& plan, const Gpu& gpu) {
  const int64_t bytes = p.dtype == TILEWISE_FLOAT32 ? 4 : 2;
  const int64_t rows = is_varlen_q(p) && p.max_seqlen_q == 0 && p.batch > 0
                           ? ceil_div(p.seqlen_q, p.batch)
                           : max_rows(p);
  const int64_t row_bytes = (p.head_dim + p.head_dim_v) * bytes + plan.head_dim * 8;
  const auto budget = static_cast<int64_t>(gpu.l2_bytes * kL2Fraction);
  const int64_t heads = heads_within_budget(rows * row_bytes, budget);
  return plan.family == Family::wgmma ? min(heads, kMaxWgmmaHeadGroup) : max(heads, kMinHeadGroup);
}

// Tile order for deterministic dQ sums of wgmma. Without a causal mask the loops of all key tiles
// begin at row 0, so the tiles of a head proceed one semaphore wait (one or two steps) apart. CTAs
// that start together therefore compute tiles of many heads: as many heads as fill the GPU with all
// of their tiles. With a causal mask, each key tile begins at its own rows, and if the last tile
// starts first, no tile has to wait at its beginning. Kernels that split columns hold the semaphore
// for most of a step, so they are faster with few tiles of a head at once. (Speed relative to
// non-deterministic sums, D128, 4k rows, full and causal: 0.90 and 0.82; head by head or from the
// first tile 0.71 and 0.72.)
void order_for_semaphores(const Problem& p, const Plan& plan, const Gpu& gpu, TileOrder& order) {
  const bool by_columns = !plan.kernel_set->persistent_backward;
  if (by_columns && p.window_right >= 0) return;
  order.longest_tile = p.window_right >= 0 ? LongestTile::last : LongestTile::first;
  const int64_t resident_clusters = gpu.sm_count / plan.kernel_set->backward_tile.cluster_size;
  order.interleave_heads(ceil_div(resident_clusters, max<int64_t>(1, order.tiles)));
}

TileOrder choose_order(const Problem& p, const Plan& plan, const Gpu& gpu) {
  TileOrder order;
  order.tiles = static_cast<int32_t>(ceil_div(max_keys(p), plan.tile_k));
  order.heads = static_cast<int32_t>(p.heads_kv);
  order.sequences = static_cast<int32_t>(p.batch);
  order.longest_tile = longest_tile(p);
  if (order.longest_tile != LongestTile::none) order.interleave_heads(heads_in_l2(p, plan, gpu));
  if (p.deterministic != 0 && plan.family == Family::wgmma)
    order_for_semaphores(p, plan, gpu, order);
  return order;
}

// The larger grid of the key and row kernels or, for wgmma, an upper bound of the grid of the
// prepare kernel, which has CTAs for both.
int64_t largest_grid(const Problem& p, const Gradients& g, const Plan& plan) {
  const Size keys = Size(plan.blocks) * plan.kernel_set->backward_tile.cluster_size;
  const Size rows = Size(row_blocks(p, plan)) * plan.kernel_set->prepare_splits;
  const Size wgmma_prepare =
      plan.family == Family::wgmma ? keys + rows : max(keys.value(), rows.value());
  return max(wgmma_prepare.value(), common::dbias_blocks(p, g));
}

}  // namespace

Plan plan_backward(const Request& request, Family family, const Gpu& gpu,
                   const Registry& registry) {
  const Problem& p = request.problem;
  const Gradients& g = request.gradients;
  Plan plan;
  plan.family = family;
  plan.kernel_set = find_kernels(request, family, gpu, registry);
  if (plan.kernel_set == nullptr) return plan;
  const KernelSet& kernel_set = *plan.kernel_set;
  plan.form = fits_plain(request) ? Form::plain : Form::general;
  plan.architecture = kernel_set.architecture;
  plan.head_dim = kernel_set.head_dim;
  plan.tile_q = kernel_set.backward_tile.rows;
  plan.tile_k = kernel_set.backward_tile.keys;
  plan.order = choose_order(p, plan, gpu);
  const Size tiles = max_tiles(is_varlen_k(p), p.seqlen_k, max_keys(p), p.batch, plan.tile_k);
  plan.blocks = (tiles * p.heads_kv).value();
  plan.grid = largest_grid(p, g, plan);
  if (!plan.can_be_launched()) return plan;
  if (family != Family::simt && nan_may_leak(p))
    plan.nan_recompute = find_kernels(request, Family::simt, gpu, registry);
  plan.workspace_bytes = backward_workspace(p, g, plan).bytes;
  return plan;
}

int64_t row_blocks(const Problem& p, const Plan& plan) {
  return p.batch == 0 ? 0 : p.heads_q * (PaddedRows{plan.tile_q}.count(p) / plan.tile_q);
}

BackwardWorkspace backward_workspace(const Problem& p, const Gradients& g, const Plan& plan) {
  Workspace workspace;
  BackwardWorkspace regions;
  const int64_t row_tiles = row_blocks(p, plan);
  const int64_t rows = row_tiles * plan.tile_q;
  if (p.check != 0) regions.report = workspace.take<IndexFault>(1);
  regions.index_copies = workspace.take<int32_t>(common::IndexCopies::entries_of_backward(p));
  if (is_varlen_k(p)) regions.table = workspace.take<TileOrder::Entry>(p.batch + 1);
  if (plan.nan_recompute != nullptr) {
    regions.key_flags = workspace.take<uint8_t>(plan.blocks);
    regions.row_flags = workspace.take<uint8_t>(row_tiles);
  }
  regions.row_delta = workspace.take<float>(rows);
  if (plan.family != Family::simt) {
    regions.row_lse = workspace.take<float>(rows);
    // The plain form of wgmma has no far rows: see docs/numerics.md.
    if (plan.family == Family::mma_sync || plan.form == Form::general) {
      regions.row_origin = workspace.take<float>(rows);
      regions.row_origin_low = workspace.take<float>(rows);
      regions.far_rows = workspace.take<uint64_t>(1);
    }
    regions.dq_sum = workspace.take<float>(Size(rows) * plan.head_dim);
    if (plan.family == Family::wgmma) {
      regions.descriptors = workspace.take<TileDescriptor>(
          Size(plan.blocks) * plan.kernel_set->backward_tile.cluster_size);
      // In semaphore order a CTA waits for CTAs of earlier tiles, which might not start while
      // another CTA computes a second tile, so the grid is not persistent. The CTAs of a cluster
      // start together.
      const bool persistent = plan.kernel_set->persistent_backward && p.deterministic == 0;
      if (persistent) regions.tile_counter = workspace.take<int32_t>(1);
    }
    if (p.deterministic != 0) regions.dq_semaphores = workspace.take<int32_t>(row_tiles);
  }
  if (g.dscale != nullptr) regions.dscale_partials = workspace.take<float>(row_tiles);
  if (g.dsinks != nullptr)
    regions.dsinks_partials =
        workspace.take<double>(Size(p.heads_q) * common::dsinks_row_blocks(p));
  regions.bytes = workspace.bytes();
  return regions;
}

}  // namespace tilewise::cuda
