// How decoding is cut: which blocks read alone, and who merges what they have found.
#include "cuda/plan_decode.h"

#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

// Whether tiles are nearly as many as multiprocessors, or more.
bool has_many_tiles(const Gpu& gpu, int64_t blocks) {
  return blocks * 4 >= int64_t{gpu.multiprocessors} * 3;
}

// Rows of a tile of decoding.
int64_t rows_of_tile(const Problem& p, const Plan& plan) { return most_rows(p) * plan.pack; }

// Whether so many blocks, each alone on its multiprocessor, read as fast as memory is: a warp reads
// 37 gigabytes a second, memory nine tenths of what its clock and bus say. Of more rows more of
// them have more to merge. (Alone and not, B9 with 8k keys and 32/8 heads, 72 blocks: H200 116 and
// 73 us, H100 114 and 105; B12, 96: 116 and 94, 132 and 139; B6, 96: 61 and 51, 69 and 73; B14,
// 112: 117 and 108; B16, 128: 121 and 123. H200, 16/1 heads with 2k keys, 96: 32.4 and 31.0,
// 112: 32.9 and 34.5; 64/8 with 4k, 96: 33.8 and 29.1, 112: 34.0 and 36.7.)
bool are_fast_alone(const Gpu& gpu, int64_t blocks, int64_t rows) {
  const int64_t share = rows <= 4 ? 40 : 46;  // of what memory's clock and bus say
  return blocks * share >= gpu.memory_speed;
}

// Splits that a cluster can merge. sm_90 and 100 run larger clusters than every GPU does.
constexpr int64_t kSmallCluster = 8;
int64_t most_merged_splits(const Gpu& gpu) {
  return gpu.sm < 110 ? kMostMergedSplits : kSmallCluster;
}

// Of keys, that a block alone on its multiprocessor is worth: more where it has less to compute.
constexpr int64_t fewest_tiles(int64_t rows) { return rows <= 8 ? 16 : 8; }

// The fewest tiles of keys of which blocks alone on their multiprocessors read as fast as two of
// them: with a stage more in their ring, and nothing to merge. (H200: B8 with 8k keys 67.2 -> 64.9
// us; but B4 with 4k keys, 16 tiles each, 21.3 -> 21.9. H100, one block for each multiprocessor:
// B128 with 1k keys and 16/1 heads 30.9 -> 27.8, with 512 20.0 -> 15.7, B16 with 512 15.9 -> 15.1.)
// Of uneven lengths a pair of blocks, which its cluster merges, is better up to 24 tiles if it has
// few rows or there are few pairs, and up to 16 if it has not many (H100, full and log-normal
// lengths: B16 with 1k and 32/8 heads 27.4, 14.5 -> 27.6, 15.5, B80 with 1k and 16/1 22.2, 13.9
// -> 21.5, 17.9, B16 with 512 and 64/8 17.4, 12.1 -> 16.0, 13.4; but B128 with 512 and 16/1 20.3,
// 14.1 -> 16.5, 14.1). So are two blocks of any sequence's parts (full and log-normal, alone and
// not: B8 with 8k 94.3, 16.4 -> 94.3, 14.8, B2 with 32k 94.0, 14.1 -> 94.6, 13.2; but B8 with 16k
// 179.5, 69.6 -> 182.2, 69.3, B32 with 16k and 16/1 97.1, 44.0 -> 118.1, 48.6).
int64_t least_tiles_alone(int64_t rows, bool uneven, bool split, bool many) {
  if (split) return !uneven ? 24 : rows <= 4 ? 128 : 64;
  if (!uneven) return many ? 8 : 16;
  return rows <= 4 || !many ? 24 : fewest_tiles(rows);
}

// Whether a few tiles are sooner read by one block than handed on by two (H200, 16/1 heads, pairs
// and alone: B96 with 256 keys 10.8 -> 7.4 us, B92 with 512 13.2 -> 10.9, B72 12.0 -> 10.8; but B80
// with 1k 17.2 -> 18.1, and 8 rows, B11 with 512 and 64/8 10.9 -> 10.6, are level).
bool is_short(int64_t rows, int64_t tiles) { return rows > 8 && 4 <= tiles && tiles <= 8; }

// Whether they do on pages, where a warp spends more instructions: one block for each
// multiprocessor, where memory is not faster than a warp, whose boxes take longer where rows of
// several heads lie side by side. (Pages of 16, full and log-normal lengths, H100: B16 with 1k
// keys and 32/8 heads 27.9, 16.3 -> 27.7, 15.4, with 4k 96.0, 37.6 -> 94.9, 37.9, with 8k 184.3,
// 74.4 -> 184.5, 75.1, B128 with 1k and 16/1 32.0, 20.2 -> 29.1, 17.0, with 512 20.4, 14.8 -> 17.0,
// 14.2; H200: the latter with 1k 25.1, 18.8 -> 24.6, 15.7, but B16 with 1k and 64/8 22.0, 16.0
// -> 24.0, 14.3, with 2k and 32/8 38.1, 19.3 -> 42.0, 19.1.)
bool reads_pages_alone(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks,
                       int64_t tiles) {
  constexpr int64_t kMost = 64;         // tiles
  constexpr int64_t kSpeedOfWarp = 26;  // gigabytes a second, of several heads
  const bool keeps_up = p.heads_kv == 1 || gpu.memory_speed <= kSpeedOfWarp * gpu.multiprocessors;
  return gpu.multiprocessors / blocks == 1 && has_many_tiles(gpu, blocks) &&
         fewest_tiles(rows_of_tile(p, plan)) <= tiles && tiles <= kMost && keeps_up;
}

}  // namespace

bool reads_float8(const UnitTable& unit) { return unit.dtype == TILEWISE_FLOAT8_E4M3; }

bool has_boxes(const UnitTable& unit) { return unit.boxes.tma_forward.function != nullptr; }
bool reads_boxes(const Plan& plan) {
  return plan.form == Form::boxes || plan.form == Form::paged_boxes;
}
bool can_merge(const Plan& plan) { return has_boxes(*plan.unit) && plan.form != Form::general; }

// Whether the block of a tile that is done last merges its parts: most have one part then, and few
// more than a few. (H100, a second kernel and this, full and log-normal lengths: B16 with 2k keys
// and 64/8 heads 49.8, 24.4 -> 49.2, 23.3 us, with 8k and 32/8 178.1, 73.1 -> 177.8, 72.3, in pages
// of 16 with 4k 36.6 -> 37.2; but B12 with 2k 39.4, 19.7 -> 38.8, 20.2, and B8 with 8k keys 17.2
// -> 18.6.) Of more rows a second kernel has more to read (H200: B88 with 2k and 16/1 heads 35.0,
// 18.7 -> 30.1, 16.9, B96 38.1, 19.9 -> 32.8, 18.4, B12 with 4k and 64/8 55.8, 22.3 -> 54.5, 20.8;
// but B7 37.9, 20.9 -> 35.8, 22.1).
bool merges_parts(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool several = rows_of_tile(p, plan) > 4 && blocks * 3 >= int64_t{gpu.multiprocessors} * 2;
  return can_merge(plan) && (several || has_many_tiles(gpu, blocks));
}

// What a block may have to walk before it merges. Tiles of float8 have twice the keys: B16 with 8k
// keys and one head of them 18.0 -> 21.6 us with eight. A block that is alone on its multiprocessor
// copies small pages with too little on its way (H200, pages of 1: B1 with 4k keys 11.3 -> 10.6 us,
// with 8k 17.2 -> 15.0, B2 with 4k 17.1 -> 15.8; but B4 with 4k, two blocks each, 21.9 -> 24.5).
int64_t few_tiles(const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (reads_float8(*plan.unit)) return 4;
  return plan.form == Form::paged && blocks <= gpu.multiprocessors ? 2 : 8;
}

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
         (splits == 2 || ceil_div(key_tiles, splits) <= few_tiles(plan, gpu, blocks * splits));
}

// Blocks that read as fast as more of them. Of float8 a warp converts what it reads: for each byte
// it takes three times the instructions (820 a tile of 64 keys and 128 columns, of 16 bits 557).
// Small pages: see `few_tiles` (H200, pages of 1: B16 with 2k keys 41.9 -> 40.2 us, with 4k 72.8
// -> 69.0, B8 with 8k 71.7 -> 69.8; but B16 with 1k 21.7 -> 24.6, B8 with 2k 23.2 -> 23.9, B4 with
// 16k and 16/1 heads 17.6 -> 19.9).
int64_t readers_of_multiprocessor(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t tiles) {
  if (reads_float8(*plan.unit)) return 3;
  const int64_t all = gpu.multiprocessors;
  const bool much = blocks * 4 >= all && blocks <= all && blocks * tiles >= 24 * all;
  return plan.form == Form::paged && much ? 4 : 2;
}

bool are_uneven(const Problem& p) {
  return p.batch > 1 && p.seqused_k != nullptr && p.window_left < 0;
}

bool reads_alone(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (!reads_boxes(plan) || p.num_splits > 0 || blocks == 0 || reads_float8(*plan.unit))
    return false;
  const int64_t splits = gpu.multiprocessors / blocks;
  const int64_t tiles = ceil_div(keys_of_tile(p, most_rows(p)), plan.tile_k);
  if (plan.form == Form::paged_boxes) return reads_pages_alone(p, plan, gpu, blocks, tiles);
  const int64_t rows = rows_of_tile(p, plan);
  if (splits == 1 && !are_uneven(p) && is_short(rows, tiles)) return true;
  if (splits == 0 || !are_fast_alone(gpu, blocks * splits, rows)) return false;
  return ceil_div(tiles, splits) >=
         least_tiles_alone(rows, are_uneven(p), splits > 1, has_many_tiles(gpu, blocks));
}

// Decoding by boxes: two blocks a multiprocessor read as fast as four, with half as many partial
// results (B1 with 32k keys: 38.0 -> 36.3 us), and one is not far behind. So do the blocks of small
// clusters, and of larger ones there is room for one.
int64_t choose_splits_of_boxes(const Plan& plan, const Gpu& gpu, int64_t blocks,
                               int64_t key_tiles) {
  const int64_t all = gpu.multiprocessors;
  int64_t readers = readers_of_multiprocessor(plan, gpu, blocks, key_tiles);
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
// log-normal, 36.7 -> 40.4, late 36.4). All on an H100, alike on an H200.
NextStart next_start(const Plan& plan, const Gpu& gpu) {
  if (leaves_results(plan)) return NextStart::after_first_keys;
  if (!decodes(plan) || plan.second != nullptr) return NextStart::at_end;
  const int64_t all = gpu.multiprocessors;
  const auto early_if = [](bool early, NextStart otherwise) {
    return early ? NextStart::after_first_keys : otherwise;
  };
  if (plan.cluster > 1) return early_if(plan.cluster == 2 || plan.blocks <= all, NextStart::at_end);
  if (plan.parts.any())
    return early_if(!plan.alone && plan.tiles <= all, NextStart::before_last_result);
  return early_if(plan.blocks <= 2 * all, NextStart::before_last_result);
}

// Its blocks are there when it begins to merge, and leave little room for those of the next call.
// (B4 with 16k keys and 16/1 heads 19.2 -> 18.6 us, log-normal lengths 17.1 -> 16.0; but B8 with 8k
// and lengths, blocks that are alone, 94.2 -> 102.6.)
NextStart next_start_of_merge(const Plan& plan) {
  const bool early = leaves_results(plan) && decodes(plan) && !plan.alone && plan.second == nullptr;
  return early ? NextStart::after_first_keys : NextStart::at_end;
}

}  // namespace tilewise::cuda
