// Planning of the forward: head packing, tile order, key splits and workspace.
// docs/lab/decode-planner-rules.md has the measurements behind the thresholds for decoding.
#include "cuda/common/check.h"
#include "cuda/common/prepare.h"
#include "cuda/plan.h"
#include "cuda/plan_decode.h"
#include "cuda/plan_shape.h"
#include "cuda/workspace.h"

namespace tilewise::cuda {
namespace {

// Part of L2 for the keys and values of interleaved heads: 32 of the 50 MB of an H200 measured
// best.
constexpr double kForwardL2Fraction = 0.65;
constexpr int64_t kMinForwardHeadGroup = 16;

// Minimum keys per split. A split costs a pass over partial results, so it needs enough work.
constexpr int64_t kMinKeysPerSplit = 256;        // few rows: bound by reading keys
constexpr int64_t kMinKeysPerDecodeSplit = 64;   // decode tiles, whose CTAs are one warp
constexpr int64_t kMinKeysPerFloat8Split = 128;  // the same number of bytes
constexpr int64_t kMinKeysPerLatentSplit = 128;  // decode tiles whose rows have 512 columns of out
constexpr int64_t kMinKeysPerFullTileSplit = 1024;  // full row tiles: bound by the products

// Short sequences leave a tile of one head nearly empty, so all heads of a GQA group share it.
int32_t choose_pack(const Problem& p, int64_t tile) {
  const int64_t group = group_size(p);
  // Not max_rows(p): rows that share a warp take branches together, so batch-invariant results
  // require a packing that does not depend on the batch.
  const int64_t rows = selection_rows(p);
  const bool saves_tiles = ceil_div(rows * group, tile) < group * ceil_div(rows, tile);
  return group > 1 && rows <= tile && saves_tiles ? static_cast<int32_t>(group) : 1;
}

TileOrder choose_order(const Problem& p, const Gpu& gpu, int64_t tile, int32_t pack) {
  TileOrder order;
  order.tiles = static_cast<int32_t>(ceil_div(max_rows(p) * pack, tile));
  order.heads = static_cast<int32_t>(p.heads_q / pack);
  order.sequences = static_cast<int32_t>(p.batch);
  order.longest_tile = order.tiles > 1 ? longest_row_tile(p) : LongestTile::none;
  const int64_t keys_and_values =
      typical_keys(p) * (p.head_dim + p.head_dim_v) * element_bytes(dtypes_of(p).kv);
  const auto budget = static_cast<int64_t>(gpu.l2_bytes * kForwardL2Fraction);
  const int64_t head_group = heads_within_budget(keys_and_values, budget) * group_size(p) / pack;
  if (order.longest_tile != LongestTile::none)
    order.interleave_heads(max(head_group, kMinForwardHeadGroup));
  return order;
}

int64_t min_keys_per_split(const KernelSet& kernel_set) {
  if (kernel_set.forward_tile.rows > kDecodeRows) return kMinKeysPerSplit;
  if (kernel_set.values == ValuesIn::key_columns) return kMinKeysPerLatentSplit;
  return reads_float8(kernel_set) ? kMinKeysPerFloat8Split : kMinKeysPerDecodeSplit;
}

// The smallest number of splits whose waves are at least 85 % as full as with the best number.
int64_t choose_splits(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const KernelSet& kernel_set = *plan.kernel_set;
  if (p.num_splits > 0) return p.num_splits;
  const Tile& tile = kernel_set.forward_tile;
  const int64_t resident_ctas = int64_t{gpu.sm_count} * max(1, tile.blocks_per_sm);
  if (blocks == 0 || blocks * 5 >= resident_ctas * 4) return 1;
  const int64_t rows = ceil_div(tile.rows, plan.pack);
  const int64_t key_tiles = ceil_div(max_keys_per_tile(p, min(rows, max_rows(p))), tile.keys);
  if (uses_tma(kernel_set) && key_tiles > 0) return choose_tma_splits(plan, gpu, blocks, key_tiles);
  // The one key/value head of a latent cache has few tiles even where 128 query heads fill them.
  const bool full_tiles =
      max_rows(p) * plan.pack > tile.rows && kernel_set.values != ValuesIn::key_columns;
  const int64_t min_tiles =
      ceil_div(full_tiles ? kMinKeysPerFullTileSplit : min_keys_per_split(kernel_set), tile.keys);
  const int64_t max_splits = min(kMaxSplits, key_tiles / min_tiles);
  // The number of CTAs divided by the capacity of their waves. `splits` must grow from call to
  // call: every launch of a decode runs this loop, and two 64-bit divisions per step took 2 us.
  const auto occupancy = [&](int64_t splits, int64_t& capacity) {
    while (capacity < blocks * splits) capacity += resident_ctas;
    return static_cast<double>(blocks * splits) / static_cast<double>(capacity);
  };
  double best = 0.0;
  int64_t capacity = resident_ctas;
  for (int64_t s = 1; s <= max_splits; ++s) best = max(best, occupancy(s, capacity));
  capacity = resident_ctas;
  for (int64_t s = 1; s <= max_splits; ++s) {
    if (occupancy(s, capacity) < 0.85 * best) continue;
    // Splits are whole tiles: if one more split does not make them shorter, the last one is empty.
    if (s == 1 || ceil_div(key_tiles, s) < ceil_div(key_tiles, s - 1)) return s;
  }
  return 1;
}

// The batch-invariant rule depends only on a sequence's own lengths and assumes that the sequence
// has the GPU to itself. Sequences with more than a few rows have enough CTAs without splits.
SplitRule invariant_rule(const Problem& p, int64_t tile_rows) {
  constexpr int64_t kCtas = 256;
  constexpr int64_t kRows = 8;
  return {.min_keys = kMinKeysPerSplit,
          .max_splits = max<int64_t>(1, kCtas / p.heads_kv),
          .max_rows = min(kRows, max<int64_t>(1, tile_rows / group_size(p)))};
}

// The rule for device lengths without a chunk schedule. Splits have as many keys as suit caches
// that are a quarter full (half full if tiles are few). The grid is sized for full caches; CTAs
// past the end of a short sequence exit at once.
SplitRule device_length_rule(const Problem& p, const Gpu& gpu, const KernelSet& kernel_set,
                             int64_t blocks) {
  const Tile& tile = kernel_set.forward_tile;
  const int64_t resident_ctas = int64_t{gpu.sm_count} * max(1, tile.blocks_per_sm);
  // CTAs of the grid per resident CTA. Few tiles have more partial results per key, so they get
  // fewer CTAs.
  const int64_t oversubscription = blocks * 2 > resident_ctas ? 4 : 2;
  // Keys per split with `ctas` CTAs for full caches. Computed in double, which cannot
  // overflow, and clamped, because the rule divides 32-bit numbers.
  const auto keys_per_split = [&](int64_t ctas) {
    const double keys = __builtin_ceil(static_cast<double>(max_keys(p)) *
                                       static_cast<double>(blocks) / static_cast<double>(ctas));
    return static_cast<int64_t>(min(keys, static_cast<double>(INT32_MAX)));
  };
  // Splits of one tile are mostly prologue and epilogue, and a second wave of them ends late.
  const int64_t min_keys =
      max<int64_t>(tile.keys, min<int64_t>(keys_per_split(resident_ctas), 2 * tile.keys));
  return {.min_keys = max(max(min_keys_per_split(kernel_set), min_keys),
                          keys_per_split(resident_ctas * oversubscription)),
          .max_splits = kMaxSplits};
}

// ChunkSchedule::max_imbalance_quarters. With several tiles per SM, sequences of up to kShort tiles
// (2k keys) are not cut unless the longest has more keys than, roughly, an SM reads in total.
int32_t choose_max_imbalance(const Gpu& gpu, int64_t blocks) {
  return static_cast<int32_t>(
      clamp(blocks * 23 / (5 * gpu.sm_count), ChunkSchedule::kDefaultImbalanceQuarters, 1 << 20));
}

// Whether long sequences start first and the longest are cut (concurrent_sequences), so that the
// CTAs that start last finish quickly. That pays with more tiles than run at once, or with nearly
// as many and caches for at least 2k keys. Each CTA reads all lengths, so the batch must not be too
// large.
bool starts_longest_first(const Problem& p, const Plan& plan, int64_t blocks,
                          int64_t resident_ctas) {
  constexpr int64_t kMaxSequences = 256;
  constexpr int64_t kMinTiles = 32;  // per sequence
  const bool some_wait = blocks > resident_ctas;
  const bool nearly_all_run =
      blocks * 4 > resident_ctas * 3 && max_keys(p) >= kMinTiles * plan.tile_k;
  return has_warp_pipelines(plan) && p.batch <= kMaxSequences && (some_wait || nearly_all_run);
}

// The chunks of a decode with device lengths. Long sequences are cut where short ones are not;
// uniform lengths are cut as often as without device lengths. The grid has room for as many CTAs
// per SM as saturate memory, plus one chunk per sequence that may be short. If the last CTA of a
// tile combines, or with one CTA per SM, the grid has room for one wave more than the tiles need:
// in a larger grid the hardware gives some SMs one chunk too many and others none, because CTAs
// without a chunk come last. For few long sequences with many heads that would be too few chunks to
// cut all long ones, so there are at least kMinSpareChunks more chunks than sequences.
ChunkSchedule chunk_schedule(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  constexpr int64_t kMinSpareChunks = 8;
  int64_t keys = 0;
  if (!checked_mul(p.batch, max<int64_t>(1, max_keys(p)), &keys) || keys > 1 << 30 ||
      blocks > INT32_MAX / (8 * kDecodeRows))
    return {};  // counts would exceed 32 bits
  const int64_t sms = gpu.sm_count;
  const int64_t heads = max<int64_t>(1, blocks / p.batch);
  const bool last_cta = last_cta_combines(p, plan, gpu, blocks);
  const int64_t tiles = ceil_div(max<int64_t>(1, max_keys(p)), int64_t{plan.tile_k});
  const int64_t ctas_per_sm = ctas_to_saturate(plan);
  int64_t max_chunks = max(ctas_per_sm * sms / heads, p.batch) + p.batch;
  if (last_cta || plan.one_cta_per_sm) {
    max_chunks = ((ceil_div(blocks, sms) + 1) * sms - 1) / heads;
  }
  ChunkSchedule schedule;
  if (blocks > 3 * sms && tiles > ChunkSchedule::kShort)
    max_chunks = max(max_chunks, p.batch + kMinSpareChunks);
  max_chunks = clamp(max_chunks, plan.splits * p.batch, tiles * p.batch);
  if (last_cta) max_chunks = min(max_chunks, p.batch + ChunkArrivals::kMaxChunks - 1);
  schedule.max_chunks = static_cast<int32_t>(max_chunks);
  schedule.chunks_if_uniform = static_cast<int32_t>(min(plan.splits, max_chunks / p.batch));
  schedule.tile = plan.tile_k;
  if (last_cta) schedule.max_imbalance_quarters = choose_max_imbalance(gpu, blocks);
  const int64_t resident_ctas = sms * max(1, plan.kernel_set->forward_tile.blocks_per_sm);
  if (starts_longest_first(p, plan, blocks, resident_ctas))
    schedule.concurrent_sequences = static_cast<int32_t>(max<int64_t>(1, resident_ctas / heads));
  return schedule;
}

// Whether a decode with device lengths uses the same number of splits for every sequence, which
// clusters combine: chunks cost more than they save if no CTA has more than a few tiles.
bool uses_uniform_splits(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                         int64_t splits) {
  const int64_t tiles = ceil_div(max_keys(p), int64_t{plan.tile_k});
  if (!has_warp_pipelines(plan)) return false;
  return plan.max_cluster_size > 0 || prefers_uniform_splits(gpu, blocks, tiles) ||
         (ceil_div(tiles, splits) <= max_tiles_per_cluster_cta(plan) &&
          cluster_combine_is_faster(plan, gpu, blocks, splits, tiles));
}

// Plans a decode with device lengths: chunks or, for kernels that cannot count them, a split rule.
void split_device_lengths(Plan& plan, const Problem& p, const Gpu& gpu, int64_t blocks) {
  if (uses_decode_tile(plan)) plan.chunks = chunk_schedule(p, plan, gpu, blocks);
  plan.last_cta_combines = plan.chunks.any() && last_cta_combines(p, plan, gpu, blocks);
  plan.splits = 1;
  plan.split_rule = {};
  if (plan.chunks.any()) return;
  const SplitRule rule = device_length_rule(p, gpu, *plan.kernel_set, blocks);
  plan.splits = rule.splits(max_rows(p), max_keys(p));
  if (plan.splits > 1) plan.split_rule = rule;
}

// Chooses splits or chunks, their rule per sequence, and the stride of partial results.
void split(Plan& plan, const Problem& p, const Gpu& gpu, int64_t blocks) {
  if (p.batch_invariant != 0) {
    plan.split_rule = invariant_rule(p, plan.tile_q);
    const bool uniform = !is_varlen_q(p) && p.seqused_q == nullptr;
    plan.splits = plan.split_rule.splits(uniform ? p.seqlen_q : 0, max_keys(p));
    if (!uniform) plan.partial_stride = static_cast<int32_t>(plan.split_rule.max_rows);
    return;
  }
  plan.splits = choose_splits(p, plan, gpu, blocks);
  plan.split_rule = {.min_keys = 0, .max_splits = plan.splits, .max_rows = INT64_MAX};
  const bool decoding = max_rows(p) * group_size(p) <= kDecodeRows;
  if (has_device_lengths(p) && decoding && p.num_splits == 0 &&
      !uses_uniform_splits(p, plan, gpu, blocks, plan.splits))
    split_device_lengths(plan, p, gpu, blocks);
}

// Whether the CTAs of a tile's splits form a cluster that combines them.
bool cluster_combines(const Problem& p, const Plan& plan, const Gpu& gpu) {
  if (plan.max_cluster_size > 0) return plan.splits > 1;
  return has_warp_pipelines(plan) && !plan.chunks.any() &&
         cluster_combine_is_faster(plan, gpu, plan.blocks / plan.splits, plan.splits,
                                   ceil_div(max_keys_per_tile(p, max_rows(p)), plan.tile_k));
}

// CTAs of the main kernel or, if it is larger, of a combine kernel with a CTA per row.
int64_t largest_grid(const Problem& p, const Plan& plan) {
  const bool one_cta_per_row = plan.splits > 1 && needs_combine_kernel(plan);
  return one_cta_per_row ? max(plan.blocks, total_rows(p) * p.heads_q) : plan.blocks;
}

}  // namespace

bool needs_combine_kernel(const Plan& plan) {
  if (plan.stream_k.any()) return true;
  return plan.chunks.any() ? !plan.last_cta_combines : plan.splits > 1 && plan.cluster_size == 1;
}

int64_t packed_rows(const Problem& p, const Plan& plan) { return max_rows(p) * plan.pack; }

Plan plan_forward_tiles(const Problem& p, const KernelSet& kernel_set, const Gpu& gpu) {
  Plan plan;
  plan.kernel_set = &kernel_set;
  plan.form = forward_form(p, kernel_set);
  plan.architecture = kernel_set.architecture;
  plan.head_dim = kernel_set.head_dim;
  const Tile& tile = kernel_set.forward_tile_of(plan.form);
  plan.tile_q = tile.rows;
  plan.tile_k = tile.keys;
  plan.pack = choose_pack(p, plan.tile_q);
  const Size tiles = max_tiles(is_varlen_q(p), p.seqlen_q * plan.pack, max_rows(p) * plan.pack,
                               p.batch, plan.tile_q);
  plan.grid = (tiles * (p.heads_q / plan.pack)).value();
  if (!plan.can_be_launched()) return plan;
  plan.tiles = static_cast<int32_t>(plan.grid);
  plan.order = choose_order(p, gpu, plan.tile_q, plan.pack);
  return plan;
}

void plan_key_splits(Plan& plan, const Problem& p, const Gpu& gpu) {
  const int64_t blocks = plan.tiles;
  plan.one_cta_per_sm = uses_one_cta_per_sm(p, plan, gpu, blocks);
  plan.max_cluster_size = choose_max_cluster_size(p, plan, gpu, blocks);
  plan.warps_per_tile = choose_warps_per_tile(p, plan, gpu, blocks);
  plan.stages = choose_stages(plan, gpu, blocks);
  split(plan, p, gpu, blocks);
}

void plan_forward_grid(Plan& plan, const Problem& p, const Gpu& gpu) {
  plan.blocks = plan.chunks.any() ? int64_t{plan.chunks.max_chunks} * plan.order.heads
                                  : plan.tiles * plan.splits;
  plan.placement = place_chunks(plan, gpu, ceil_div(max_keys(p), int64_t{plan.tile_k}));
  plan.order.splits = static_cast<int32_t>(plan.splits);
  if (cluster_combines(p, plan, gpu)) plan.cluster_size = static_cast<int32_t>(plan.splits);
  plan.grid = largest_grid(p, plan);
}

void finish_forward_plan(Plan& plan, const Problem& p, const Gpu& gpu) {
  plan.pdl_trigger = choose_pdl_trigger(plan, gpu);
  plan.combine_pdl_trigger = choose_combine_pdl_trigger(p, plan, gpu);
  plan.workspace_bytes = forward_workspace(p, plan).bytes;
}

ForwardWorkspace forward_workspace(const Problem& p, const Plan& plan) {
  Workspace workspace;
  ForwardWorkspace regions;
  if (p.check != 0) regions.report = workspace.take<IndexFault>(1);
  regions.index_copies = workspace.take<int32_t>(common::IndexCopies::entries_of_forward(p));
  if (is_varlen_q(p) && plan.order.tiles > 1)
    regions.table = workspace.take<TileOrder::Entry>(p.batch + 1);
  if (plan.dynamic_scheduling) regions.tile_counter = workspace.take<int32_t>(4);
  if (plan.rows_per_recompute > 0)
    regions.recompute_list =
        workspace.take<int32_t>(plan.blocks * plan.tile_q / plan.rows_per_recompute);
  regions.values = workspace.take<uint8_t>(plan.value_bytes);
  if (plan.nan_recompute != nullptr)
    regions.flags = workspace.take<uint8_t>(plan.blocks + (plan.chunks.any() ? plan.tiles : 0));
  if (plan.last_cta_combines) regions.arrivals = workspace.take<ChunkArrivals>(plan.tiles);
  if (plan.chunks.any() || needs_combine_kernel(plan)) {
    const Size rows = plan.stream_k.any() ? Size(plan.stream_k.num_results()) * plan.tile_q
                      : plan.chunks.any()
                          ? Size(plan.blocks) * packed_rows(p, plan)
                          : Size(partial_rows(p, plan.partial_stride)) * p.heads_q * plan.splits;
    // If the last CTA combines, a row has the columns of the head-dim tile followed by its lse.
    const int64_t columns = plan.last_cta_combines ? plan.head_dim + 4
                            : plan.stream_k.any()  ? plan.stream_k.columns
                                                   : p.head_dim_v;
    regions.partial_out = workspace.take<float>(rows * columns);
    regions.partial_lse = workspace.take<float>(plan.last_cta_combines ? Size(0) : rows);
  }
  regions.bytes = workspace.bytes();
  return regions;
}

}  // namespace tilewise::cuda
