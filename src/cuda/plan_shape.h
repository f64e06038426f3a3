// What the planner knows of the lengths without reading an index array.
#pragma once

#include "attention/problem.h"
#include "base/size.h"

namespace tilewise::cuda {

inline int64_t element_bytes(const Problem& p) { return p.dtype == TILEWISE_FLOAT32 ? 4 : 2; }

// Of keys and values.
inline int32_t key_dtype(const Problem& p) {
  return p.kv_float8 != 0 ? TILEWISE_FLOAT8_E4M3 : p.dtype;
}
inline int64_t key_bytes(const Problem& p) { return p.kv_float8 != 0 ? 1 : element_bytes(p); }

// Packed rows of a sequence up to which a problem is decoding: a tile of mma_sync's cut for it.
inline constexpr int64_t kDecodeRows = 16;

inline bool ragged_rows(const Problem& p) { return p.cu_seqlens_q != nullptr; }
// Pages and the rows of kv_batch_idx give every sequence the same room.
inline bool ragged_keys(const Problem& p) {
  return p.cu_seqlens_k != nullptr && p.block_table == nullptr;
}

inline int64_t bounded(int64_t length, int64_t bound) {
  return bound > 0 ? min(length, bound) : length;
}
// Rows and keys of the longest possible sequence.
inline int64_t most_rows(const Problem& p) { return bounded(p.seqlen_q, p.max_seqlen_q); }
// Those that decide between kernels, which differ in rounding: a batch-invariant choice may not
// depend on the longest sequence.
inline int64_t deciding_rows(const Problem& p) {
  return p.batch_invariant != 0 && ragged_rows(p) ? INT64_MAX / 4 / p.heads_q : most_rows(p);
}
inline int64_t max_keys(const Problem& p) { return bounded(key_capacity(p), p.max_seqlen_k); }

// Keys of a sequence that is neither short nor long: what splitting is judged by.
inline int64_t usual_keys(const Problem& p) {
  if (!ragged_keys(p) || p.max_seqlen_k > 0 || p.batch == 0) return max_keys(p);
  return ceil_div(p.seqlen_k, p.batch);
}

// Keys that a tile of rows meets, at most.
inline int64_t keys_of_tile(const Problem& p, int64_t rows) {
  const int64_t keys = usual_keys(p);
  if (p.window_left < 0 || p.window_right < 0) return keys;
  return min(keys, min(keys, p.window_left) + min(keys, p.window_right) + rows);
}

// Tiles of all sequences together, at most. Ragged: every sequence may end in a started tile.
inline Size most_tiles(bool ragged, int64_t total, int64_t longest, int64_t batch, int64_t tile) {
  const Size alike = Size(batch) * ceil_div(longest, tile);
  return ragged ? min(alike.value(), total / tile + batch) : alike;
}

// The largest power of two of pairs (head, sequence) whose bytes fit into `budget`, at least one.
inline int64_t pairs_within(int64_t bytes, int64_t budget) {
  int64_t pairs = 1;
  while (pairs < (int64_t{1} << 20) && pairs * 2 * max(bytes, int64_t{1}) <= budget) pairs *= 2;
  return pairs;
}

}  // namespace tilewise::cuda
