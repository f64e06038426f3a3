// Appends new keys and values to a cache, with rotary embedding of the new keys and of q.
#pragma once

#include "base/parallel.h"
#include "tilewise/tilewise.h"

namespace tilewise::cpu {

// Implements tilewise_append_kv for fp32, fp16 and bf16. `append` has been validated, including the
// entries of its int32 arrays: every key position lies within the cache, every page and batch index
// within its table, every rotary position within [0, rotary_rows). Nothing is allocated. Each
// element is rounded once from fp32, so the result does not depend on the number of threads.
void append_kv(const tilewise_kv_append& append, const Parallel& parallel);

// The position at which row 0 of sequence `b` is rotated; row r is rotated at this plus r. It is
// rotary_seqlens[b] if given, else the number of keys before the row, without left padding.
inline int64_t rotary_position(const tilewise_kv_append& append, int64_t b) {
  if (append.rotary_seqlens) return append.rotary_seqlens[b];
  const int64_t keys = append.cache_seqlens ? append.cache_seqlens[b] : 0;
  return append.leftpad_k ? keys - append.leftpad_k[b] : keys;
}

}  // namespace tilewise::cpu
