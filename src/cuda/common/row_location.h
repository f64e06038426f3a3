// Finds the sequence of a row or key from its number among those of all sequences, and whether the
// row is in use.
#pragma once

#include "cuda/common/prepare.h"

namespace tilewise::cuda::common {

// The last sequence that starts at or before `row`: the one that holds it, or the last sequence if
// `row` lies past its end.
TILEWISE_FN int64_t sequence_at(const int32_t* cu_seqlens, int64_t batch, int64_t row) {
  int64_t low = 0;
  int64_t high = batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Where a row (or key) lies in a tensor, its sequence, and its index in the sequence.
struct RowLocation {
  int64_t batch;        // the sequence
  int64_t index;        // in the sequence
  int64_t batch_index;  // in the tensor's batch dimension; 0 for packed varlen tensors
  int64_t row;          // in the tensor
  bool in_use;
  bool in_sequence;  // false past the end of the last sequence

  TILEWISE_FN int64_t offset(const tilewise_tensor& view) const {
    return batch_index * view.stride_batch + row * view.stride_row;
  }
};

// The location of a row of q; `flat` is its number among the rows of all sequences.
TILEWISE_FN RowLocation locate_row(const Problem& p, int64_t flat) {
  if (p.cu_seqlens_q == nullptr) {
    const int64_t b = flat / p.seqlen_q;
    const int64_t i = flat - b * p.seqlen_q;
    return {b, i, b, i, i < used_rows(p, b).value, true};
  }
  if (p.batch == 0) return {0, flat, 0, flat, false, false};
  const int64_t b = sequence_at(p.cu_seqlens_q, p.batch, flat);
  const Range rows = query_rows(p, b);
  const int64_t i = flat - rows.begin;
  return {b, i, 0, flat, i >= 0 && i < used_rows(p, b).value, rows.contains(flat)};
}

// The same for a row of dk and dv, that is, for a key.
TILEWISE_FN RowLocation locate_key(const Problem& p, int64_t flat) {
  if (!keys_per_sequence(p) && p.cu_seqlens_k != nullptr) {
    if (p.batch == 0) return {0, flat, 0, flat, false, false};
    const int64_t b = sequence_at(p.cu_seqlens_k, p.batch, flat);
    const SequenceKeys keys = sequence_keys(p, b);
    const int64_t i = flat - p.cu_seqlens_k[b];
    const int64_t key = flat - keys.first;
    return {b, i, 0, flat, key >= 0 && key < keys.count, flat < p.cu_seqlens_k[b + 1]};
  }
  const int64_t capacity = key_capacity(p);
  const int64_t b = flat / capacity;
  const int64_t i = flat - b * capacity;
  if (b >= p.batch) return {b, i, b, i, false, false};
  const SequenceKeys keys = sequence_keys(p, b);
  return {b, i, b, i, i >= keys.first && i - keys.first < keys.count, true};
}

}  // namespace tilewise::cuda::common
