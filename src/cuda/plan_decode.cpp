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
bool has_many_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * 4 >= int64_t{gpu.sm_count} * 3;
}
bool has_several_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * 3 >= int64_t{gpu.sm_count} * 2;
}
bool are_nearly_half(const Gpu& gpu, int64_t blocks) {
  return blocks * 20 >= int64_t{gpu.sm_count} * 9;
}

// Splits that a cluster can merge. sm_90 and 100 run larger clusters than every GPU does.
constexpr int64_t kSmallCluster = 8;
int64_t most_merged_splits(const Gpu& gpu) {
  return gpu.sm < 110 ? kMaxClusterSplits : kSmallCluster;
}

// The fewest tiles of keys of a sequence, whose length only the GPU knows, of which a block that is
// alone on its multiprocessor reads as fast as two that share them: it has nothing to merge if all
// are long, and more of it if they are not.
int64_t least_tiles_alone(int64_t rows, int64_t tiles, bool several, bool many_of_pages) {
  constexpr int64_t kMany = 32;
  if (rows <= 4) return many_of_pages ? 16 : kMany;
  if (rows <= 8) return several ? 16 : kMany;
  return several || tiles <= 8 ? 4 : kMany;
}

}  // namespace

bool max_clusters_fit(const Gpu& gpu, int64_t blocks) {
  return blocks * kMaxClusterSplits * 4 <= int64_t{gpu.sm_count} * 3;
}

// Counting parts takes a microsecond, and more than a few sequences of many keys are worth it.
bool few_tiles_split_uniformly(const Gpu& gpu, int64_t blocks, int64_t tiles) {
  constexpr int64_t kMost = 16;  // of a multiprocessor
  const bool some = blocks * tiles <= kMost * gpu.sm_count;
  return max_clusters_fit(gpu, 2 * blocks) || (some && max_clusters_fit(gpu, blocks));
}

bool reads_float8(const KernelSet& kernel_set) { return kernel_set.dtype == TILEWISE_FLOAT8_E4M3; }

bool uses_tma(const KernelSet& kernel_set) {
  return kernel_set.tma.tma_forward.function != nullptr;
}
bool has_warp_rings(const Plan& plan) {
  return uses_tma(*plan.kernel_set) && plan.form != Form::general;
}

// Whether the block of a tile that is done last merges its parts: most have one part then, and few
// more than a few. Of more rows a second kernel has more to read.
bool last_cta_combines(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool several = packed_rows(p, plan) > 4 ? are_nearly_half(gpu, blocks)
                                                : plan.one_cta_per_sm && blocks * 2 > gpu.sm_count;
  return has_warp_rings(plan) && (several || has_many_tiles(gpu, blocks));
}

// What a block may have to walk before it merges. Tiles of float8 have twice the keys.
int64_t few_tiles(const Plan& plan) { return reads_float8(*plan.kernel_set) ? 4 : 8; }

// Whether so many splits are better merged by clusters, with no second launch: where blocks have a
// few tiles, and clusters, which get their places all at once, find them. Pairs find theirs, and
// are better however many tiles they have.
bool cluster_combine_is_faster(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                               int64_t key_tiles) {
  const int64_t rounds = splits <= kSmallCluster ? 2 : 1;
  return splits > 1 && splits <= most_merged_splits(gpu) &&
         blocks * splits <= rounds * gpu.sm_count &&
         (splits == 2 || ceil_div(key_tiles, splits) <= few_tiles(plan));
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
int64_t least_tiles_of_split(const Gpu& gpu, int64_t blocks, int64_t tiles, int64_t rows,
                             bool uneven, bool paged) {
  const int64_t splits = gpu.sm_count / blocks;
  if (rows <= 8) return !uneven && splits == 2 ? 16 : 128;
  if (few_tiles_split_uniformly(gpu, blocks, tiles) && splits < kMaxSplits) return paged ? 16 : 6;
  if (!uneven) return 24;
  return are_nearly_half(gpu, blocks) && !paged ? 32 : 64;
}

// For two blocks of readers a multiprocessor: those of the next launch come early.
bool has_room_for_readers(const Plan& plan, const Gpu& gpu) {
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
int64_t clusters_of_uneven(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                           int64_t tiles) {
  constexpr int64_t kFew = 4;
  const int64_t all = gpu.sm_count;
  const bool several = blocks * kFew * 2 > 3 * all;
  if (!several || !has_device_lengths(p) || tiles < kFew || reads_float8(*plan.kernel_set))
    return 0;
  const bool are_half = blocks * kFew <= 2 * all && tiles <= 64;
  const int64_t rows = packed_rows(p, plan);
  const bool are_long = rows > 1 || tiles > 16 || plan.form != Form::tma;
  const bool are_more = blocks * kFew <= 3 * all && are_long && tiles <= 32 && rows <= 4;
  return are_half || are_more ? kFew : 0;
}

// Few tiles: what a second kernel costs is most of their time. Eight clusters are too many: those
// of the next call find no places beside them.
int64_t clusters_of_few(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t tiles) {
  const int64_t merged = most_merged_splits(gpu);
  const bool fits = max_clusters_fit(gpu, blocks) && has_room_for_readers(plan, gpu) &&
                    tiles > merged && ceil_div(tiles, merged) <= few_tiles(plan);
  return fits ? merged : 0;
}

}  // namespace

int32_t choose_max_cluster_size(const Problem& p, const Plan& plan, const Gpu& gpu,
                                int64_t blocks) {
  if (p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 || !has_warp_rings(plan)) return 0;
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), int64_t{plan.tile_k});
  const int64_t few = clusters_of_few(plan, gpu, blocks, tiles);
  return static_cast<int32_t>(few > 0 ? few : clusters_of_uneven(p, plan, gpu, blocks, tiles));
}

// Two warps read what a multiprocessor is to read, where more blocks would have more to merge. Of
// pages each takes a warp more instructions.
bool uses_one_cta_per_sm(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (!has_warp_rings(plan) || p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 ||
      !has_room_for_readers(plan, gpu))
    return false;
  const int64_t splits = gpu.sm_count / blocks;
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), plan.tile_k);
  const int64_t rows = packed_rows(p, plan);
  const bool paged = plan.form != Form::tma;
  const bool uneven = paged || has_device_lengths(p);
  const bool several = has_several_tiles(gpu, blocks);
  if (splits == 0 || (paged && rows <= 8 && splits > 1) || (paged && rows <= 4 && !several))
    return false;
  if (splits > 1) {
    const int64_t least = least_tiles_of_split(gpu, blocks, tiles, rows, uneven, paged);
    return ceil_div(tiles, splits) >= least;
  }
  const bool many_of_pages = paged && has_many_tiles(gpu, blocks);
  return tiles >= (uneven ? least_tiles_alone(rows, tiles, several, many_of_pages) : 4);
}

namespace {

// Whether blocks that are alone read as fast as memory is if each reads so many gigabytes a second
// (of what its clock and bus say).
bool are_as_fast_as_memory(const Gpu& gpu, int64_t blocks, int64_t each) {
  const int64_t splits = gpu.sm_count / blocks;
  return gpu.memory_speed > 0 && blocks * splits * each >= gpu.memory_speed;
}

// Whether so many blocks of two readers take turns that none waits for a last one. Of lengths that
// only the GPU knows, short sequences are better off with more blocks of one.
bool take_many_turns(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), int64_t{plan.tile_k});
  return !plan.one_cta_per_sm && plan.form == Form::tma && p.num_splits == 0 &&
         p.batch_invariant == 0 && has_room_for_readers(plan, gpu) &&
         blocks * 3 >= int64_t{gpu.sm_count} * 10 && tiles >= (has_device_lengths(p) ? 17 : 16);
}

}  // namespace

int32_t choose_warps_per_tile(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.max_cluster_size > 0) return max_clusters_fit(gpu, blocks) ? kMaxWarpsPerTile : 1;
  if (!plan.one_cta_per_sm) return take_many_turns(p, plan, gpu, blocks) ? kMaxWarpsPerTile : 1;
  const int64_t splits = gpu.sm_count / blocks;
  const bool many = keys_of_tile(p, most_rows(p)) >= 32 * plan.tile_k * splits;
  const bool one = plan.form == Form::tma && many && packed_rows(p, plan) <= 8 &&
                   are_as_fast_as_memory(gpu, blocks, 27);
  return one ? 1 : kMaxWarpsPerTile;
}

// What is on its way beyond what memory needs makes it slower, and some blocks last. A warp with
// three slots has what nearly all multiprocessors need, two with two slots what two thirds do. Of
// warps that share multiprocessors two slots are enough where there are two or three on each.
int32_t choose_stages(const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.form != Form::tma || reads_float8(*plan.kernel_set)) return 0;
  const bool alone = plan.one_cta_per_sm && plan.max_cluster_size == 0;
  const int64_t tenths = plan.max_cluster_size > 0 ? 7 : 14;  // of the multiprocessors
  const bool few = alone ? plan.warps_per_tile > 1 && are_as_fast_as_memory(gpu, blocks, 36)
                         : blocks * 10 >= tenths * gpu.sm_count;
  return few ? kFewStages : 0;
}

// Parts that there are where lengths are alike, where blocks are alone and the parts leave a
// sixteenth of the multiprocessors without one. The hardware gives the first of a grid to the
// multiprocessors that have nothing to do, and then one to each, one GPC after the other. Long
// works, which are worth it, wait until none of them has anything to do. Where multiprocessors have
// room for two, the second ones of a few of them had better not be those of a few GPCs.
CtaPlacement place_chunks(const Plan& plan, const Gpu& gpu, int64_t tiles) {
  constexpr int64_t kLong = 64;  // tiles
  constexpr int64_t kLongOfTwo = 32;
  const ChunkSchedule& parts = plan.chunks;
  if (!parts.any() || parts.longest_first()) return {};
  const int64_t all = gpu.sm_count;
  const int64_t works = int64_t{plan.tiles} * parts.chunks_if_uniform;
  if (!plan.one_cta_per_sm) {
    const int64_t second = works - all;
    const bool some = second > 0 && second * 16 <= all * 15;
    if (tiles < kLongOfTwo || !some || plan.blocks < 2 * all) return {};
    return {static_cast<int32_t>(second), static_cast<int32_t>(all), static_cast<int32_t>(all)};
  }
  const int64_t places = tiles >= kLong ? all : 2 * all - works;
  if (works * 16 > all * 15 || places > plan.blocks) return {};
  return {static_cast<int32_t>(works), static_cast<int32_t>(places)};
}

// Decoding by boxes: two blocks a multiprocessor read as fast as four, with half as many partial
// results (B1 with 32k keys: 38.0 -> 36.3 us), and one is not far behind. So do the blocks of small
// clusters, and of larger ones there is room for one.
int64_t choose_tma_splits(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles) {
  if (plan.max_cluster_size > 0)
    return ceil_div(key_tiles, ceil_div(key_tiles, int64_t{plan.max_cluster_size}));
  const int64_t all = gpu.sm_count;
  int64_t readers = ctas_to_saturate(plan);
  if (blocks * 2 > all * readers) return 1;
  if (plan.one_cta_per_sm) readers = 1;
  const int64_t most = min(kMaxSplits, readers * all / blocks);
  int64_t merged = min(most, kSmallCluster);
  if (blocks * merged * 8 < all * 7) merged = min(most_merged_splits(gpu), all / blocks);
  const bool busy = blocks * merged * 8 >= all * 7 || key_tiles <= merged;
  const bool merge = plan.form != Form::general && busy &&
                     cluster_combine_is_faster(plan, gpu, blocks, merged, key_tiles);
  const int64_t tiles = ceil_div(key_tiles, merge ? merged : most);  // splits are whole tiles
  return ceil_div(key_tiles, tiles);
}

namespace {

bool decodes(const Plan& plan) {
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
  if (!decodes(plan) || plan.nan_recompute != nullptr) return PdlTrigger::at_exit;
  const int64_t all = gpu.sm_count;
  const auto early_if = [](bool early, PdlTrigger otherwise) {
    return early ? PdlTrigger::after_first_loads : otherwise;
  };
  if (plan.cluster_size > 1)
    return early_if(plan.cluster_size == 2 || plan.blocks <= all, PdlTrigger::at_exit);
  if (plan.placement.any() && plan.placement.ctas == all) return PdlTrigger::at_exit;
  if (plan.chunks.any()) return early_if(plan.tiles <= all, PdlTrigger::before_epilogue);
  return early_if(plan.blocks <= 2 * all, PdlTrigger::before_epilogue);
}

// Its blocks are there when it begins to merge, and leave little room for those of the next call,
// or room that is uneven if they are many, unless all that is read is little.
PdlTrigger choose_combine_pdl_trigger(const Problem& p, const Plan& plan, const Gpu& gpu) {
  constexpr int64_t kLittle = 24;  // tiles of keys of a multiprocessor
  if (!needs_combine_kernel(plan) || !decodes(plan) || plan.nan_recompute != nullptr)
    return PdlTrigger::at_exit;
  const int64_t all = gpu.sm_count;
  const int64_t rows = plan.tiles * packed_rows(p, plan);
  const auto is_little = [&] {
    return plan.tiles * ceil_div(max_keys(p), int64_t{plan.tile_k}) <= kLittle * all;
  };
  const bool few = rows <= 2 * all || (rows <= 6 * all && is_little());
  const bool fits = plan.one_cta_per_sm
                        ? max_clusters_fit(gpu, plan.tiles) && rows > common::kMaxRowsWithGroups
                        : few;
  return fits ? PdlTrigger::after_first_loads : PdlTrigger::at_exit;
}

}  // namespace tilewise::cuda
