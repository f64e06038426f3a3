// What the planner derives from the shape of a problem without reading an index array: bounds on
// sequence lengths, and which tiles are longest.
#pragma once

#include "attention/request.h"
#include "base/size.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda {

// A problem with at most this many packed rows per sequence is a decode: the rows of mma_sync's
// decode tile.
inline constexpr int64_t kDecodeRows = 16;

inline bool is_varlen_q(const Problem& p) { return p.cu_seqlens_q != nullptr; }
// With pages or kv_batch_idx every sequence has the same capacity.
inline bool is_varlen_k(const Problem& p) {
  return p.cu_seqlens_k != nullptr && p.block_table == nullptr;
}

inline int64_t bounded(int64_t length, int64_t bound) {
  return bound > 0 ? min(length, bound) : length;
}
// Upper bound of the query rows of a sequence.
inline int64_t max_rows(const Problem& p) { return bounded(p.seqlen_q, p.max_seqlen_q); }
// The rows by which kernels are selected. Kernels differ in rounding, so a batch-invariant choice
// may not depend on the longest sequence of the batch.
inline int64_t selection_rows(const Problem& p) {
  return p.batch_invariant != 0 && is_varlen_q(p) ? INT64_MAX / 4 / p.heads_q : max_rows(p);
}
// Upper bound of the keys of a sequence.
inline int64_t max_keys(const Problem& p) { return bounded(key_capacity(p), p.max_seqlen_k); }

// Keys of a typical sequence, by which the number of splits is chosen: the mean of a varlen batch
// without max_seqlen_k, otherwise the maximum.
inline int64_t typical_keys(const Problem& p) {
  if (!is_varlen_k(p) || p.max_seqlen_k > 0 || p.batch == 0) return max_keys(p);
  return ceil_div(p.seqlen_k, p.batch);
}

// Upper bound of the keys that a tile of rows attends to in a typical sequence.
inline int64_t max_keys_per_tile(const Problem& p, int64_t rows) {
  const int64_t keys = typical_keys(p);
  if (p.window_left < 0 || p.window_right < 0) return keys;
  return min(keys, min(keys, p.window_left) + min(keys, p.window_right) + rows);
}

// Upper bound of the tiles of all sequences. In a varlen batch of `total` rows or keys every
// sequence may end with a partial tile.
inline Size max_tiles(bool varlen, int64_t total, int64_t longest, int64_t batch, int64_t tile) {
  const Size uniform = Size(batch) * ceil_div(longest, tile);
  return varlen ? min(uniform.value(), total / tile + batch) : uniform;
}

// The tile of rows that attends to most keys: the last one with a causal mask, the first one with a
// left window alone. Most masks that are given as data are causal as well.
inline LongestTile longest_row_tile(const Problem& p) {
  if (p.mask != nullptr) return LongestTile::last;
  if (p.window_right >= 0 && p.window_left < 0) return LongestTile::last;
  return p.window_left >= 0 && p.window_right < 0 ? LongestTile::first : LongestTile::none;
}

// The largest power of two of heads, with `bytes` each, that fit into `budget` bytes; at least one.
inline int64_t heads_within_budget(int64_t bytes, int64_t budget) {
  int64_t heads = 1;
  while (heads < (int64_t{1} << 20) && heads * 2 * max(bytes, int64_t{1}) <= budget) heads *= 2;
  return heads;
}

}  // namespace tilewise::cuda
