// The gradient of bias, from recomputed scores: a CTA owns a tile of dbias and sums over all
// batches, heads or rows that bias is broadcast over. So the sums have a fixed order and need no
// workspace.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kDbiasThreads = 256;
inline constexpr int kDbiasTile = 64;   // rows and keys
inline constexpr int kDbiasDepth = 32;  // head dimensions in shared memory at a time
inline constexpr int kDbiasStride = kDbiasTile + 4;
inline constexpr int kDbiasStateBytes = 2048;  // Dbias::State
inline constexpr int kDbiasSharedBytes =
    (2 * kDbiasDepth * kDbiasStride + 3 * kDbiasTile) * 4 + kDbiasStateBytes;

struct DbiasParams {
  Problem problem{};
  Gradients gradients{};
  tilewise_mask mask = kNoMask;
};

// The shape of dbias: [batches, heads, rows, keys], with 1 for a dimension that is summed over.
struct DbiasShape {
  int64_t batches;
  int64_t heads;
  int64_t rows;
  int64_t keys;

  TILEWISE_FN static DbiasShape of(const Problem& p, const Gradients& g) {
    return {g.dbias_stride_batch == 0 ? 1 : p.batch, g.dbias_stride_head == 0 ? 1 : p.heads_q,
            g.dbias_stride_row == 0 ? 1 : g.dbias_rows, g.dbias_keys};
  }
  TILEWISE_FN int64_t row_tiles() const { return ceil_div(rows, kDbiasTile); }
  TILEWISE_FN int64_t key_tiles() const { return ceil_div(keys, kDbiasTile); }
};

inline int64_t dbias_blocks(const Problem& p, const Gradients& g) {
  if (g.dbias == nullptr) return 0;
  const DbiasShape shape = DbiasShape::of(p, g);
  return shape.batches * shape.heads * shape.row_tiles() * shape.key_tiles();
}

// dbias.cuh: template <class Element> dbias(DbiasParams)

}  // namespace tilewise::cuda::common
