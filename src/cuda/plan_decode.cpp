// How decoding is cut: which blocks read alone, and who merges what they have found. The points
// that each limit separates: docs/lab/decode-planner-rules.md.
#include "cuda/plan_decode.h"

#include "cuda/common/combine.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

// Whether tiles are nearly as many as multiprocessors, or more; whether they are two thirds of
// them, or nearly half.
bool fills_3_of_4_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 4 >= int64_t{gpu.sm_count} * 3;
}
bool fills_2_of_3_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 3 >= int64_t{gpu.sm_count} * 2;
}
bool fills_9_of_20_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 20 >= int64_t{gpu.sm_count} * 9;
}

// Splits that a cluster can merge. sm_90 and 100 run larger clusters than every GPU does.
constexpr int64_t kSmallCluster = 8;
int64_t max_cluster_splits(const Gpu& gpu) {
  return gpu.sm < 110 ? kMaxClusterSplits : kSmallCluster;
}

// The fewest tiles of keys of a sequence, whose length only the GPU knows, of which a block that is
// alone on its multiprocessor reads as fast as two that share them: it has nothing to merge if all
// are long, and more of it if they are not.
int64_t min_tiles_for_one_cta(int64_t rows, int64_t tiles, bool several, bool paged_3_of_4_sms) {
  constexpr int64_t kMinTiles = 32;
  if (rows <= 4) return paged_3_of_4_sms ? 16 : kMinTiles;
  if (rows <= 8) return several ? 16 : kMinTiles;
  return several || tiles <= 8 ? 4 : kMinTiles;
}

}  // namespace

bool max_clusters_fit(const Gpu& gpu, int64_t blocks) {
  return blocks * kMaxClusterSplits * 4 <= int64_t{gpu.sm_count} * 3;
}

// Counting parts takes a microsecond, and more than a few sequences of many keys are worth it.
bool prefers_uniform_splits(const Gpu& gpu, int64_t blocks, int64_t tiles) {
  constexpr int64_t kMaxTilesPerSm = 16;  // of a multiprocessor
  const bool some = blocks * tiles <= kMaxTilesPerSm * gpu.sm_count;
  return max_clusters_fit(gpu, 2 * blocks) || (some && max_clusters_fit(gpu, blocks));
}

bool reads_float8(const KernelSet& kernel_set) { return kernel_set.dtype == TILEWISE_FLOAT8_E4M3; }

bool uses_tma(const KernelSet& kernel_set) {
  return kernel_set.tma.tma_forward.function != nullptr;
}
bool has_warp_pipelines(const Plan& plan) {
  return uses_tma(*plan.kernel_set) && plan.form != Form::general;
}

// Whether the block of a tile that is done last merges its parts: most have one part then, and few
// more than a few. Of more rows a second kernel has more to read.
bool last_cta_combines(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool several = packed_rows(p, plan) > 4 ? fills_9_of_20_sms(gpu, blocks)
                                                : plan.one_cta_per_sm && blocks * 2 > gpu.sm_count;
  return has_warp_pipelines(plan) && (several || fills_3_of_4_sms(gpu, blocks));
}

// What a block may have to walk before it merges. Tiles of float8 have twice the keys.
int64_t max_tiles_per_cluster_cta(const Plan& plan) { return reads_float8(*plan.kernel_set) ? 4 : 8; }

// Whether so many splits are better merged by clusters, with no second launch: where blocks have a
// few tiles, and clusters, which get their places all at once, find them. Pairs find theirs, and
// are better however many tiles they have.
bool cluster_combine_is_faster(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                               int64_t key_tiles) {
  const int64_t ctas_per_sm = splits <= kSmallCluster ? 2 : 1;
  return splits > 1 && splits <= max_cluster_splits(gpu) &&
         blocks * splits <= ctas_per_sm * gpu.sm_count &&
         (splits == 2 || ceil_div(key_tiles, splits) <= max_tiles_per_cluster_cta(plan));
}

// Blocks that read as fast as more of them. Of float8 a warp converts what it reads: for each byte
// it takes three times the instructions (820 a tile of 64 keys and 128 columns, of 16 bits 557).
int64_t ctas_to_saturate(const Plan& plan) { return reads_float8(*plan.kernel_set) ? 3 : 2; }

bool has_device_lengths(const Problem& p) {
  return p.batch > 1 && p.seqused_k != nullptr && p.window_left < 0;
}

namespace {

// The fewest tiles of keys of each of several splits or, of lengths that are not known, parts, of
// which a block that is alone on its multiprocessor reads as fast as two that share them. Few tiles
// have most to merge.
int64_t min_tiles_per_split_for_one_cta(const Gpu& gpu, int64_t blocks, int64_t tiles, int64_t rows,
                             bool device_lengths, bool paged) {
  const int64_t splits = gpu.sm_count / blocks;
  if (rows <= 8) return !device_lengths && splits == 2 ? 16 : 128;
  if (prefers_uniform_splits(gpu, blocks, tiles) && splits < kMaxSplits) return paged ? 16 : 6;
  if (!device_lengths) return 24;
  return fills_9_of_20_sms(gpu, blocks) && !paged ? 32 : 64;
}

// For two blocks of readers a multiprocessor: those of the next launch come early.
bool two_warp_split_ctas_fit(const Plan& plan, const Gpu& gpu) {
  constexpr int32_t kReserved = 1024;  // bytes of each block
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  const bool built = kernels.tma_forward_warp_split.function != nullptr ||
                     kernels.forward_warp_split.function != nullptr;
  const int32_t bytes =
      max(kernels.tma_forward_warp_split.shared_bytes, kernels.forward_warp_split.shared_bytes);
  return built && 2 * (bytes + kReserved) <= gpu.shared_bytes + kReserved;
}

// Four blocks for each tile, where tiles are nearly half as many as multiprocessors or more and
// only the GPU knows their lengths: nobody counts parts then, or waits for a second kernel, and
// long sequences are cut. Three of them on a multiprocessor read full lengths a little slower than
// two warps of one block, and of one row of few contiguous tiles no others faster.
int64_t cluster_size_for_device_lengths(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                           int64_t tiles) {
  constexpr int64_t kClusterSize = 4;
  const int64_t sms = gpu.sm_count;
  const bool several = blocks * kClusterSize * 2 > 3 * sms;
  if (!several || !has_device_lengths(p) || tiles < kClusterSize || reads_float8(*plan.kernel_set))
    return 0;
  const bool fill_half = blocks * kClusterSize <= 2 * sms && tiles <= 64;
  const int64_t rows = packed_rows(p, plan);
  const bool many_rows_or_tiles = rows > 1 || tiles > 16 || plan.form != Form::tma;
  const bool fill_3_of_4 = blocks * kClusterSize <= 3 * sms && many_rows_or_tiles && tiles <= 32 && rows <= 4;
  return fill_half || fill_3_of_4 ? kClusterSize : 0;
}

// Few tiles: what a second kernel costs is most of their time. Eight clusters are too many: those
// of the next call find no places beside them.
int64_t cluster_size_at_low_occupancy(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t tiles) {
  const int64_t cluster_splits = max_cluster_splits(gpu);
  const bool fits = max_clusters_fit(gpu, blocks) && two_warp_split_ctas_fit(plan, gpu) &&
                    tiles > cluster_splits && ceil_div(tiles, cluster_splits) <= max_tiles_per_cluster_cta(plan);
  return fits ? cluster_splits : 0;
}

}  // namespace

int32_t choose_max_cluster_size(const Problem& p, const Plan& plan, const Gpu& gpu,
                                int64_t blocks) {
  if (p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 || !has_warp_pipelines(plan)) return 0;
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), int64_t{plan.tile_k});
  const int64_t low_occupancy_size = cluster_size_at_low_occupancy(plan, gpu, blocks, tiles);
  return static_cast<int32_t>(low_occupancy_size > 0 ? low_occupancy_size : cluster_size_for_device_lengths(p, plan, gpu, blocks, tiles));
}

// Two warps read what a multiprocessor is to read, where more blocks would have more to merge. Of
// pages each takes a warp more instructions.
bool uses_one_cta_per_sm(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (!has_warp_pipelines(plan) || p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 ||
      !two_warp_split_ctas_fit(plan, gpu))
    return false;
  const int64_t splits = gpu.sm_count / blocks;
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), plan.tile_k);
  const int64_t rows = packed_rows(p, plan);
  const bool paged = plan.form != Form::tma;
  const bool device_lengths = paged || has_device_lengths(p);
  const bool several = fills_2_of_3_sms(gpu, blocks);
  if (splits == 0 || (paged && rows <= 8 && splits > 1) || (paged && rows <= 4 && !several))
    return false;
  if (splits > 1) {
    const int64_t min_tiles = min_tiles_per_split_for_one_cta(gpu, blocks, tiles, rows, device_lengths, paged);
    return ceil_div(tiles, splits) >= min_tiles;
  }
  const bool paged_3_of_4_sms = paged && fills_3_of_4_sms(gpu, blocks);
  return tiles >= (device_lengths ? min_tiles_for_one_cta(rows, tiles, several, paged_3_of_4_sms) : 4);
}

namespace {

// Whether blocks that are alone read as fast as memory is if each reads so many gigabytes a second
// (of what its clock and bus say).
bool saturate_memory(const Gpu& gpu, int64_t blocks, int64_t gb_per_s_of_cta) {
  const int64_t splits = gpu.sm_count / blocks;
  return gpu.memory_speed > 0 && blocks * splits * gb_per_s_of_cta >= gpu.memory_speed;
}

// Whether so many blocks of two readers take turns that none waits for a last one. Of lengths that
// only the GPU knows, short sequences are better off with more blocks of one.
bool run_many_waves(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), int64_t{plan.tile_k});
  return !plan.one_cta_per_sm && plan.form == Form::tma && p.num_splits == 0 &&
         p.batch_invariant == 0 && two_warp_split_ctas_fit(plan, gpu) &&
         blocks * 3 >= int64_t{gpu.sm_count} * 10 && tiles >= (has_device_lengths(p) ? 17 : 16);
}

}  // namespace

int32_t choose_warps_per_tile(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.max_cluster_size > 0) return max_clusters_fit(gpu, blocks) ? kMaxWarpsPerTile : 1;
  if (!plan.one_cta_per_sm) return run_many_waves(p, plan, gpu, blocks) ? kMaxWarpsPerTile : 1;
  const int64_t splits = gpu.sm_count / blocks;
  const bool long_splits = max_keys_per_tile(p, max_rows(p)) >= 32 * plan.tile_k * splits;
  const bool one_warp_saturates = plan.form == Form::tma && long_splits && packed_rows(p, plan) <= 8 &&
                   saturate_memory(gpu, blocks, 27);
  return one_warp_saturates ? 1 : kMaxWarpsPerTile;
}

// What is on its way beyond what memory needs makes it slower, and some blocks last. A warp with
// three slots has what nearly all multiprocessors need, two with two slots what two thirds do. Of
// warps that share multiprocessors two slots are enough where there are two or three on each.
int32_t choose_stages(const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.form != Form::tma || reads_float8(*plan.kernel_set)) return 0;
  const bool one_cta = plan.one_cta_per_sm && plan.max_cluster_size == 0;
  const int64_t tenths = plan.max_cluster_size > 0 ? 7 : 14;  // of the multiprocessors
  const bool saturated = one_cta ? plan.warps_per_tile > 1 && saturate_memory(gpu, blocks, 36)
                         : blocks * 10 >= tenths * gpu.sm_count;
  return saturated ? kReducedStages : 0;
}

// Parts that there are where lengths are alike, where blocks are alone and the parts leave a
// sixteenth of the multiprocessors without one. The hardware gives the first of a grid to the
// multiprocessors that have nothing to do, and then one to each, one GPC after the other. Long
// works, which are worth it, wait until none of them has anything to do. Where multiprocessors have
// room for two, the second ones of a few of them had better not be those of a few GPCs.
CtaPlacement place_chunks(const Plan& plan, const Gpu& gpu, int64_t tiles) {
  constexpr int64_t kMinTilesOneCta = 64;  // tiles
  constexpr int64_t kMinTilesTwoCtas = 32;
  const ChunkSchedule& schedule = plan.chunks;
  if (!schedule.any() || schedule.longest_first()) return {};
  const int64_t sms = gpu.sm_count;
  const int64_t chunks = int64_t{plan.tiles} * schedule.chunks_if_uniform;
  if (!plan.one_cta_per_sm) {
    const int64_t second_ctas = chunks - sms;
    const bool some = second_ctas > 0 && second_ctas * 16 <= sms * 15;
    if (tiles < kMinTilesTwoCtas || !some || plan.blocks < 2 * sms) return {};
    return {static_cast<int32_t>(second_ctas), static_cast<int32_t>(sms), static_cast<int32_t>(sms)};
  }
  const int64_t ctas = tiles >= kMinTilesOneCta ? sms : 2 * sms - chunks;
  if (chunks * 16 > sms * 15 || ctas > plan.blocks) return {};
  return {static_cast<int32_t>(chunks), static_cast<int32_t>(ctas)};
}

// Decoding by boxes: two blocks a multiprocessor read as fast as four, with half as many partial
// results (B1 with 32k keys: 38.0 -> 36.3 us), and one is not far behind. So do the blocks of small
// clusters, and of larger ones there is room for one.
int64_t choose_tma_splits(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles) {
  if (plan.max_cluster_size > 0)
    return ceil_div(key_tiles, ceil_div(key_tiles, int64_t{plan.max_cluster_size}));
  const int64_t sms = gpu.sm_count;
  int64_t ctas_per_sm = ctas_to_saturate(plan);
  if (blocks * 2 > sms * ctas_per_sm) return 1;
  if (plan.one_cta_per_sm) ctas_per_sm = 1;
  const int64_t max_splits = min(kMaxSplits, ctas_per_sm * sms / blocks);
  int64_t cluster_splits = min(max_splits, kSmallCluster);
  if (blocks * cluster_splits * 8 < sms * 7) cluster_splits = min(max_cluster_splits(gpu), sms / blocks);
  const bool fills_sms = blocks * cluster_splits * 8 >= sms * 7 || key_tiles <= cluster_splits;
  const bool cluster_combines = plan.form != Form::general && fills_sms &&
                     cluster_combine_is_faster(plan, gpu, blocks, cluster_splits, key_tiles);
  const int64_t tiles = ceil_div(key_tiles, cluster_combines ? cluster_splits : max_splits);  // splits are whole tiles
  return ceil_div(key_tiles, tiles);
}

namespace {

bool uses_decode_tile(const Plan& plan) {
  return plan.family == Family::mma_sync && plan.kernel_set->forward_tile.rows == kDecodeRows;
}

}  // namespace

// A second kernel waits for all, and had better be there. Blocks of the next call, another one of
// these, spread evenly over multiprocessors only if each has as much room for them: with one block
// each, with pairs, or with two that come and go as they please, early ones do. Larger clusters of
// two blocks each do not, nor do blocks of several turns. Parts have more blocks than there are
// places, and those of uneven lengths end at different times, but no more tiles than
// multiprocessors find places early, unless they are long and spread.
PdlTrigger choose_pdl_trigger(const Plan& plan, const Gpu& gpu) {
  if (needs_combine_kernel(plan)) return PdlTrigger::after_first_loads;
  if (!uses_decode_tile(plan) || plan.nan_recompute != nullptr) return PdlTrigger::at_exit;
  const int64_t sms = gpu.sm_count;
  const auto early_if = [](bool early, PdlTrigger otherwise) {
    return early ? PdlTrigger::after_first_loads : otherwise;
  };
  if (plan.cluster_size > 1)
    return early_if(plan.cluster_size == 2 || plan.blocks <= sms, PdlTrigger::at_exit);
  if (plan.placement.any() && plan.placement.ctas == sms) return PdlTrigger::at_exit;
  if (plan.chunks.any()) return early_if(plan.tiles <= sms, PdlTrigger::before_epilogue);
  return early_if(plan.blocks <= 2 * sms, PdlTrigger::before_epilogue);
}

// Its blocks are there when it begins to merge, and leave little room for those of the next call,
// or room that is uneven if they are many, unless all that is read is little.
PdlTrigger choose_combine_pdl_trigger(const Problem& p, const Plan& plan, const Gpu& gpu) {
  constexpr int64_t kMaxTilesPerSm = 24;  // tiles of keys of a multiprocessor
  if (!needs_combine_kernel(plan) || !uses_decode_tile(plan) || plan.nan_recompute != nullptr)
    return PdlTrigger::at_exit;
  const int64_t sms = gpu.sm_count;
  const int64_t rows = plan.tiles * packed_rows(p, plan);
  const auto reads_few_tiles = [&] {
    return plan.tiles * ceil_div(max_keys(p), int64_t{plan.tile_k}) <= kMaxTilesPerSm * sms;
  };
  const bool low_occupancy_size = rows <= 2 * sms || (rows <= 6 * sms && reads_few_tiles());
  const bool fits = plan.one_cta_per_sm
                        ? max_clusters_fit(gpu, plan.tiles) && rows > common::kMaxRowsWithGroups
                        : low_occupancy_size;
  return fits ? PdlTrigger::after_first_loads : PdlTrigger::at_exit;
}

}  // namespace tilewise::cuda
