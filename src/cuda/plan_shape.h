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

inline bool is_varlen_q(const Problem& p) { return p.cu_seqlens_q != nullptr; }
// Pages and the rows of kv_batch_idx give every sequence the same room.
inline bool is_varlen_k(const Problem& p) {
  return p.cu_seqlens_k != nullptr && p.block_table == nullptr;
}

inline int64_t bounded(int64_t length, int64_t bound) {
  return bound > 0 ? min(length, bound) : length;
}
// Rows and keys of the longest possible sequence.
inline int64_t max_rows(const Problem& p) { return bounded(p.seqlen_q, p.max_seqlen_q); }
// Those that decide between kernels, which differ in rounding: a batch-invariant choice may not
// depend on the longest sequence.
inline int64_t selection_rows(const Problem& p) {
  return p.batch_invariant != 0 && is_varlen_q(p) ? INT64_MAX / 4 / p.heads_q : max_rows(p);
}
inline int64_t max_keys(const Problem& p) { return bounded(key_capacity(p), p.max_seqlen_k); }

// Keys of a sequence that is neither short nor long: what splitting is judged by.
inline int64_t typical_keys(const Problem& p) {
  if (!is_varlen_k(p) || p.max_seqlen_k > 0 || p.batch == 0) return max_keys(p);
  return ceil_div(p.seqlen_k, p.batch);
}

// Keys that a tile of rows meets, at most.
inline int64_t max_keys_per_tile(const Problem& p, int64_t rows) {
  const int64_t keys = typical_keys(p);
  if (p.window_left < 0 || p.window_right < 0) return keys;
  return min(keys, min(keys, p.window_left) + min(keys, p.window_right) + rows);
}

// Tiles of all sequences together, at most. Ragged: every sequence may end in a started tile.
inline Size max_tiles(bool varlen, int64_t total, int64_t longest, int64_t batch, int64_t tile) {
  const Size uniform = Size(batch) * ceil_div(longest, tile);
  return varlen ? min(uniform.value(), total / tile + batch) : uniform;
}

// The largest power of two of pairs (head, sequence) whose bytes fit into `budget`, at least one.
inline int64_t heads_within_budget(int64_t bytes, int64_t budget) {
  int64_t heads = 1;
  while (heads < (int64_t{1} << 20) && heads * 2 * max(bytes, int64_t{1}) <= budget) heads *= 2;
  return heads;
}

}  // namespace tilewise::cuda
