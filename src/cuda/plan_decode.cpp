// How decoding is cut: which blocks read alone, and who merges what they have found.
#include "cuda/plan_decode.h"

#include "cuda/common/combine.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

// Whether tiles are nearly as many as multiprocessors, or more; whether they are two thirds of
// them, or nearly half.
bool has_many_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * 4 >= int64_t{gpu.multiprocessors} * 3;
}
bool has_several_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * 3 >= int64_t{gpu.multiprocessors} * 2;
}
bool are_nearly_half(const Gpu& gpu, int64_t blocks) {
  return blocks * 20 >= int64_t{gpu.multiprocessors} * 9;
}

// Splits that a cluster can merge. sm_90 and 100 run larger clusters than every GPU does.
constexpr int64_t kSmallCluster = 8;
int64_t most_merged_splits(const Gpu& gpu) {
  return gpu.sm < 110 ? kMostMergedSplits : kSmallCluster;
}

// The fewest tiles of keys of a sequence, whose length only the GPU knows, of which a block that is
// alone on its multiprocessor reads as fast as two that share them: it has nothing to merge if all
// are long, and more of it if they are not. (H200, two blocks and alone, full and log-normal
// lengths: B9 with 2k keys 24.9, 16.4 -> 24.7, 17.0 us, B12 with 8k 99.6, 39.9 -> 95.9, 39.5; but
// B9 with 1k 14.2, 10.9 -> 15.6, 12.1. Eight rows, B12 with 1k and 64/8 heads 17.1, 12.5 -> 16.7,
// 11.1; but with 512 11.3, 9.5 -> 10.6, 10.7. Sixteen, of 16/1 heads, B96 with 1k 19.8, 17.0
// -> 17.5, 14.4, with 256 11.1, 11.5 -> 8.8, 11.7, B92 with 512 13.5, 13.2 -> 11.2, 11.9; but B80
// with 1k 17.7, 13.6 -> 17.1, 16.4. In pages of 16, B16 with 1k 20.1, 13.8 -> 20.4, 12.7.)
int64_t least_tiles_alone(int64_t rows, int64_t tiles, bool several, bool many_of_pages) {
  constexpr int64_t kMany = 32;
  if (rows <= 4) return many_of_pages ? 16 : kMany;
  if (rows <= 8) return several ? 16 : kMany;
  return several || tiles <= 8 ? 4 : kMany;
}

}  // namespace

bool has_few_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * kMostMergedSplits * 4 <= int64_t{gpu.multiprocessors} * 3;
}

// Counting parts takes a microsecond, and more than a few sequences of many keys are worth it.
// (H200, 16/1 heads, parts and alike, full and log-normal lengths: B2 with 16k keys 13.1, 9.3
// -> 12.3, 9.1 us, with 128k 46.0, 23.8 -> 39.4, 23.5, B4 with 32k 24.7, 12.7 -> 23.5, 11.9, B6
// with 16k 20.8, 11.3 -> 19.6, 10.6; but B6 with 64k 56.8, 26.6 -> 54.0, 34.1.)
bool are_few_cut_alike(const Gpu& gpu, int64_t blocks, int64_t tiles) {
  constexpr int64_t kMost = 16;  // of a multiprocessor
  const bool some = blocks * tiles <= kMost * gpu.multiprocessors;
  return has_few_tiles(gpu, 2 * blocks) || (some && has_few_tiles(gpu, blocks));
}

bool reads_float8(const UnitTable& unit) { return unit.dtype == TILEWISE_FLOAT8_E4M3; }

bool has_boxes(const UnitTable& unit) { return unit.boxes.tma_forward.function != nullptr; }
bool has_warp_rings(const Plan& plan) {
  return has_boxes(*plan.unit) && plan.form != Form::general;
}

// Whether the block of a tile that is done last merges its parts: most have one part then, and few
// more than a few. (H100, a second kernel and this, full and log-normal lengths: B16 with 2k keys
// and 64/8 heads 49.8, 24.4 -> 49.2, 23.3 us, with 8k and 32/8 178.1, 73.1 -> 177.8, 72.3, in pages
// of 16 with 4k 36.6 -> 37.2; but B8 with 8k keys 17.2 -> 18.6. Blocks that are alone, H200: B12
// with 2k 30.3, 16.4 -> 28.0, 16.0, with 8k 95.8, 40.0 -> 94.9, 40.8.) Of more rows a second kernel
// has more to read (H200: B64 with 4k and 16/1 heads 43.1, 23.5 -> 40.2, 23.3, B96 with 2k 38.1,
// 19.9 -> 32.8, 18.4, B8 with 8k and 64/8 69.4, 14.6 -> 67.7, 15.9; but B48 with 4k and 16/1 35.8,
// 17.9 -> 34.6, 20.9).
bool merges_parts(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool several = packed_rows(p, plan) > 4 ? are_nearly_half(gpu, blocks)
                                                : plan.alone && blocks * 2 > gpu.multiprocessors;
  return has_warp_rings(plan) && (several || has_many_tiles(gpu, blocks));
}

// What a block may have to walk before it merges. Tiles of float8 have twice the keys: B16 with 8k
// keys and one head of them 18.0 -> 21.6 us with eight.
int64_t few_tiles(const Plan& plan) { return reads_float8(*plan.unit) ? 4 : 8; }

// Whether so many splits are better merged by clusters, with no second launch: where blocks have a
// few tiles, and clusters, which get their places all at once, find them. (B2 with 4k keys:
// clusters of 16 with two blocks a multiprocessor 13.7 us, a second kernel 13.5, clusters of
// 8 12.8.) Pairs find theirs, and are better however many tiles they have: B16 with 8k keys 126.2
// -> 124.4 us, where B8, four splits, goes from 66.6 to 68.3.
bool are_better_merged(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                       int64_t key_tiles) {
  const int64_t rounds = splits <= kSmallCluster ? 2 : 1;
  return splits > 1 && splits <= most_merged_splits(gpu) &&
         blocks * splits <= rounds * gpu.multiprocessors &&
         (splits == 2 || ceil_div(key_tiles, splits) <= few_tiles(plan));
}

// Blocks that read as fast as more of them. Of float8 a warp converts what it reads: for each byte
// it takes three times the instructions (820 a tile of 64 keys and 128 columns, of 16 bits 557).
int64_t readers_of_multiprocessor(const Plan& plan) { return reads_float8(*plan.unit) ? 3 : 2; }

bool are_uneven(const Problem& p) {
  return p.batch > 1 && p.seqused_k != nullptr && p.window_left < 0;
}

namespace {

// The fewest tiles of keys of each of several splits or, of lengths that are not known, parts, of
// which a block that is alone on its multiprocessor reads as fast as two that share them. (H100,
// full and log-normal lengths, alone and not: B8 with 16k keys 179.5, 69.6 -> 182.2, 69.3, B32 with
// 16k and 16/1 heads 97.1, 44.0 -> 118.1, 48.6; H200, two splits without lengths and more of them,
// not and alone: B8 with 8k 66.1 -> 64.1, B5 with 8k 44.3 -> 44.7, B4 with 16k 65.9 -> 66.3, B1
// with 128k 126.3 -> 125.5, B64 with 2k and 16/1 heads 22.1 -> 23.3; with lengths, in parts that
// the last block merges, B64 with 4k 40.1, 23.5 -> 38.9, 23.3. Few tiles, which have most to merge:
// B2 with 16k 12.3, 9.1 -> 12.6, 9.6, with 32k 16.8, 9.0 -> 16.2, 9.5, B3 with 16k 14.2, 12.3
// -> 14.1, 11.9; in pages of 16, B2 with 32k 17.3, 9.5 -> 16.9, 10.3.)
int64_t least_tiles_of_split(const Gpu& gpu, int64_t blocks, int64_t tiles, int64_t rows,
                             bool uneven, bool paged) {
  const int64_t splits = gpu.multiprocessors / blocks;
  if (rows <= 8) return !uneven && splits == 2 ? 16 : 128;
  if (are_few_cut_alike(gpu, blocks, tiles) && splits < kMostSplits) return paged ? 16 : 6;
  if (!uneven) return 24;
  return are_nearly_half(gpu, blocks) && !paged ? 32 : 64;
}

// For two blocks of readers a multiprocessor: those of the next launch come early.
bool has_room_for_readers(const Plan& plan, const Gpu& gpu) {
  constexpr int32_t kReserved = 1024;  // bytes of each block
  const UnitKernels& kernels = plan.unit->form(plan.form);
  const bool built = kernels.tma_forward_of_readers.function != nullptr ||
                     kernels.forward_of_readers.function != nullptr;
  const int32_t bytes =
      max(kernels.tma_forward_of_readers.shared_bytes, kernels.forward_of_readers.shared_bytes);
  return built && 2 * (bytes + kReserved) <= gpu.shared_bytes + kReserved;
}

// Four blocks for each tile, where tiles are nearly half as many as multiprocessors or more and
// only the GPU knows their lengths: nobody counts parts then, or waits for a second kernel, and
// long sequences are cut. Three of them on a multiprocessor read full lengths a little slower than
// two warps of one block. (H100, us, without and with, full and log-normal lengths: B8 with 4k keys
// 51.3, 18.9 -> 50.2, 17.7, B64 with 4k and 16/1 heads 52.2, 28.6 -> 52.5, 26.4, B10 with 1k 19.4,
// 10.4 -> 18.8, 8.8, B12 with 2k 39.0, 19.2 -> 38.9, 17.5, B3 with 2k and 32/32 37.3, 10.5 -> 38.7,
// 8.1; but B12 with 4k 71.8, 26.0 -> 73.0, 24.6, with 1k and 64/8 21.5, 11.9 -> 22.9, 10.2, B96
// with 1k and 16/1 21.8, 15.7 -> 25.1, 14.0.)
int64_t clusters_of_uneven(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                           int64_t tiles) {
  constexpr int64_t kFew = 4;
  const int64_t all = gpu.multiprocessors;
  const bool several = blocks * kFew * 2 > 3 * all;
  if (!several || !are_uneven(p) || tiles < kFew || reads_float8(*plan.unit)) return 0;
  const bool are_half = blocks * kFew <= 2 * all && tiles <= 64;
  const bool are_more = blocks * kFew <= 3 * all && tiles <= 32 && packed_rows(p, plan) <= 4;
  return are_half || are_more ? kFew : 0;
}

// Few tiles: what a second kernel costs is most of their time. Eight clusters are too many: those
// of the next call find no places beside them. (H200, us, a second kernel and this, full lengths
// that are known, that are not, and log-normal: B2 with 2k keys and 16/1 heads 7.0, 8.3, 9.3
// -> 5.6, 6.0, 6.5, with 8k 11.1, 12.2, 10.2 -> 8.6, 8.9, 7.4, B6 with 8k 12.7, 14.1, 13.2 -> 10.8,
// 11.2, 8.9, B1 with 4k 7.7 -> 6.7; eight, B1 with 8k and 32/8 12.3 -> 16.2.)
int64_t clusters_of_few(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t tiles) {
  const int64_t merged = most_merged_splits(gpu);
  const bool fits = has_few_tiles(gpu, blocks) && has_room_for_readers(plan, gpu) &&
                    tiles > merged && ceil_div(tiles, merged) <= few_tiles(plan);
  return fits ? merged : 0;
}

}  // namespace

int32_t choose_clusters(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 || !has_warp_rings(plan)) return 0;
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), int64_t{plan.tile_k});
  const int64_t few = clusters_of_few(plan, gpu, blocks, tiles);
  return static_cast<int32_t>(few > 0 ? few : clusters_of_uneven(p, plan, gpu, blocks, tiles));
}

// Two warps read what a multiprocessor is to read, where more blocks would have more to merge.
// (H200, us, in pairs of blocks that a cluster merges, and alone: B96 with 2k keys and 16/1 heads
// 31.5 -> 27.7, B16 with 256 and 32/8 8.1 -> 7.6, with 1k 19.4 -> 18.9.) Of pages each takes a warp
// more instructions (B10 with 4k in pages of 16 47.0 -> 45.9, log-normal 29.8 -> 31.5).
bool reads_alone(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (!has_warp_rings(plan) || p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 ||
      !has_room_for_readers(plan, gpu))
    return false;
  const int64_t splits = gpu.multiprocessors / blocks;
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), plan.tile_k);
  const int64_t rows = packed_rows(p, plan);
  const bool paged = plan.form != Form::boxes;
  const bool uneven = paged || are_uneven(p);
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

// A warp reads 37 gigabytes a second, two of them 60. Where so many blocks of one read as fast as
// memory is, it is better off with what fewer ask for. (H100, two and one: B14 with 8k keys 161.3
// -> 154.1 us, B16 176.9 -> 174.6, with 2k 47.7 -> 47.5, B112 with 2k and 16/1 heads 43.7 -> 43.4;
// but B96 37.8 -> 38.6, B16 with 1k 25.8 -> 26.0, in pages of 16 with 8k 182.1 -> 186.6; H200, B16
// with 8k 122.8 -> 128.8.)
int32_t choose_readers(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.clusters > 0) return has_few_tiles(gpu, blocks) ? kMostReaders : 1;
  if (!plan.alone) return 1;
  const int64_t share = packed_rows(p, plan) <= 4 ? 35 : 31;  // of what its clock and bus say
  const int64_t splits = gpu.multiprocessors / blocks;
  const bool many = keys_of_tile(p, most_rows(p)) >= 32 * plan.tile_k * splits;
  const bool fast = gpu.memory_speed > 0 && blocks * splits * share >= gpu.memory_speed;
  return plan.form == Form::boxes && many && fast ? 1 : kMostReaders;
}

// Parts that there are where lengths are alike, where blocks are alone and the parts leave a
// sixteenth of the multiprocessors without one. The hardware gives the first of a grid to the
// multiprocessors that have nothing to do, and then one to each, one GPC after the other. Long
// works, which are worth it, wait until none of them has anything to do. (H200, as they come, over
// all multiprocessors, over those twice that have nothing to do: B96 with 2k keys and 16/1 heads
// 33.1, 29.7, 29.1 us, B13 with 2k and 32/8 33.7, 30.8, 29.9; at the end B12 with 8k 104.7, 95.9,
// 100.1, B15 117.4 where, early, the two are 124.9 and 123.7; but log-normal B13 with 2k, early and
// at the end, 14.2 and 15.2.) Where multiprocessors have room for two, the second ones of a few of
// them had better not be those of a few GPCs. (H200, as they come and spread, full and log-normal
// lengths: B24 with 2k keys 51.0, 29.2 -> 50.8, 27.8 us, with 4k 99.1, 30.9 -> 94.5, 30.9, with 8k
// 193.2, 73.0 -> 183.0, 72.9, in pages of 16 193.0, 75.1 -> 189.7, 76.0, B6 with 4k and 32/32 heads
// 98.7, 32.0 -> 93.7, 31.6; but B24 with 1k 28.1, 16.9 -> 28.2, 17.0, in pages of 16 28.6 -> 29.1.)
Spread spread_parts(const Plan& plan, const Gpu& gpu, int64_t tiles) {
  constexpr int64_t kLong = 64;  // tiles
  constexpr int64_t kLongOfTwo = 32;
  const EqualParts& parts = plan.parts;
  if (!parts.any() || parts.long_first()) return {};
  const int64_t all = gpu.multiprocessors;
  const int64_t works = int64_t{plan.tiles} * parts.alike;
  if (!plan.alone) {
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
int64_t choose_splits_of_boxes(const Plan& plan, const Gpu& gpu, int64_t blocks,
                               int64_t key_tiles) {
  if (plan.clusters > 0) return ceil_div(key_tiles, ceil_div(key_tiles, int64_t{plan.clusters}));
  const int64_t all = gpu.multiprocessors;
  int64_t readers = readers_of_multiprocessor(plan);
  if (blocks * 2 > all * readers) return 1;
  if (plan.alone) readers = 1;
  const int64_t most = min(kMostSplits, readers * all / blocks);
  int64_t merged = min(most, kSmallCluster);
  if (blocks * merged * 8 < all * 7) merged = min(most_merged_splits(gpu), all / blocks);
  const bool busy = blocks * merged * 8 >= all * 7 || key_tiles <= merged;
  const bool merge =
      plan.form != Form::general && busy && are_better_merged(plan, gpu, blocks, merged, key_tiles);
  const int64_t tiles = ceil_div(key_tiles, merge ? merged : most);  // splits are whole tiles
  return ceil_div(key_tiles, tiles);
}

namespace {

bool decodes(const Plan& plan) {
  return plan.family == Family::mma_sync && plan.unit->forward_tile.rows == kDecodeRows;
}

}  // namespace

// A second kernel waits for all, and had better be there. Blocks of the next call, another one of
// these, spread evenly over multiprocessors only if each has as much room for them: with one block
// each, with pairs, or with two that come and go as they please, early ones do (B16 with 1k keys
// 26.7 -> 25.8 us, with lengths, in pairs, 27.4 -> 26.4, B1 6.23 -> 5.54). Larger clusters of two
// blocks each do not (B4 with 4k keys 27.4 -> 31.8 early, B8 with 1k 15.7 -> 16.4 late, at the
// end 15.4), nor do blocks of several turns (B48 with 1k 70.8 -> 78.1, late 70.5). Parts have more
// blocks than there are places, and those of uneven lengths end at different times (B16 with 4k,
// log-normal, 36.7 -> 40.4, late 36.4), but no more tiles than multiprocessors find places early
// (H200, B128 with 1k and 16/1 heads, late, early, at the end 21.6, 20.6, 21.3, log-normal 13.6,
// 13.5, 14.5), unless they are long and spread. The others on an H100, alike on an H200.
NextStart next_start(const Plan& plan, const Gpu& gpu) {
  if (leaves_results(plan)) return NextStart::after_first_keys;
  if (!decodes(plan) || plan.second != nullptr) return NextStart::at_end;
  const int64_t all = gpu.multiprocessors;
  const auto early_if = [](bool early, NextStart otherwise) {
    return early ? NextStart::after_first_keys : otherwise;
  };
  if (plan.cluster > 1) return early_if(plan.cluster == 2 || plan.blocks <= all, NextStart::at_end);
  if (plan.spread.any() && plan.spread.places == all) return NextStart::at_end;
  if (plan.parts.any()) return early_if(plan.tiles <= all, NextStart::before_last_result);
  return early_if(plan.blocks <= 2 * all, NextStart::before_last_result);
}

// Its blocks are there when it begins to merge, and leave little room for those of the next call,
// or room that is uneven if they are many. (B4 with 16k keys and 16/1 heads 19.2 -> 18.6 us,
// log-normal lengths 17.1 -> 16.0; but B8 with 8k and lengths, blocks that are alone, 94.2 ->
// 102.6; H200, full lengths, 512 rows: B8 with 4k keys and 64/8 heads 38.9 -> 51.7, with 8k 69.2
// -> 95.4, B32 with 8k and 16/1 40.1 -> 53.1; 1024, B64 with 4k 42.5 -> 43.5; but 768, B48 with 4k
// 35.5 -> 34.7, and 256, B8 with 8k and 32/8 68.0 -> 67.6, B4 with 8k and 64/8 38.7 -> 38.4. Blocks
// that are alone, of few tiles: B4 with 16k and 16/1 15.3 -> 14.9, log-normal 13.2 -> 12.4, but B2
// with 32k, which has 16 warps a row, 16.2 -> 17.1, log-normal 9.9 -> 9.3. More rows where all that
// is read is little: B24 with 8k and 16/1 32.8, 17.4 -> 32.8, 16.7, B6 with 4k and 64/8 31.4, 14.2
// -> 31.2, 13.8, B48 with 4k and 16/1 34.9, 17.8 -> 34.3, 17.1; but B24 with 16k 55.3, 23.2
// -> 56.0, 22.7, B48 with 8k 57.4, 25.1 -> 62.0, 24.2, B32 with 16k 70.6 -> 94.1.)
NextStart next_start_of_merge(const Problem& p, const Plan& plan, const Gpu& gpu) {
  constexpr int64_t kLittle = 24;  // tiles of keys of a multiprocessor
  if (!leaves_results(plan) || !decodes(plan) || plan.second != nullptr) return NextStart::at_end;
  const int64_t all = gpu.multiprocessors;
  const int64_t rows = plan.tiles * packed_rows(p, plan);
  const auto is_little = [&] {
    return plan.tiles * ceil_div(most_keys(p), int64_t{plan.tile_k}) <= kLittle * all;
  };
  const bool few = rows <= 2 * all || (rows <= 6 * all && is_little());
  const bool fits =
      plan.alone ? has_few_tiles(gpu, plan.tiles) && rows > common::kMostRowsOfGroups : few;
  return fits ? NextStart::after_first_keys : NextStart::at_end;
}

}  // namespace tilewise::cuda
