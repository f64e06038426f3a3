// Values of float8 as wgmma reads them: with the keys of a column next to each other, because it
// takes operands of 8 bits only with the summed index contiguous. A kernel before the forward
// writes them to the workspace, [batches, heads_kv, head_dim_v, columns].
//
// A column is a key of the sequence, and every sequence begins at a multiple of kTile columns. The
// columns of a tile past the last key are 0. Inside 32 columns the keys are permuted
// (tile::key_of_weight).
#pragma once

#include "attention/problem.h"
#include "base/size.h"

namespace tilewise::cuda::wgmma {

struct TransposedValues {
  static constexpr int kTile = 128;  // the keys of a key tile, and the bytes of a row of a TMA box

  const Problem& p;

  TILEWISE_FN bool packed() const { return p.cu_seqlens_k != nullptr; }
  TILEWISE_FN int64_t batches() const { return packed() ? 1 : p.batch; }
  TILEWISE_FN int64_t tiles() const {
    return packed() ? p.seqlen_k / kTile + p.batch + 1
                    : max<int64_t>(1, ceil_div(p.seqlen_k, kTile));
  }
  TILEWISE_FN int64_t columns() const { return tiles() * kTile; }

  int64_t bytes() const {
    return (Size(batches()) * p.heads_kv * p.head_dim_v * columns()).value();
  }

  // The tile where sequence b begins. In a varlen batch it is its first key rounded down, plus one
  // tile for every sequence before it, which leaves room for ceil(length / kTile) tiles.
  TILEWISE_FN int64_t first_tile(int64_t b) const {
    return packed() ? p.cu_seqlens_k[b] / kTile + b : 0;
  }

  // The sequence to which a tile of a batch entry may belong.
  TILEWISE_FN int64_t sequence_of(int64_t batch, int64_t tile) const {
    if (!packed()) return batch;
    int64_t low = 0;
    int64_t high = p.batch - 1;
    while (low < high) {  // the last sequence that begins at or before the tile
      const int64_t middle = (low + high + 1) / 2;
      if (first_tile(middle) <= tile)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

}  // namespace tilewise::cuda::wgmma
