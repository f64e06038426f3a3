// What the host hands to the kernels. Plain data, understood by both compilers.
#pragma once

#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/order.h"

namespace tilewise::cuda {

// Rows of all sequences together, as out, lse and the partial results count them: batch * seqlen_q,
// or T. `flat_row` is the index of row i of a sequence among them.
TILEWISE_FN int64_t total_rows(const Problem& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : p.batch * p.seqlen_q;
}
TILEWISE_FN int64_t flat_row(const Problem& p, const Sequence& s, int64_t i) {
  return (p.cu_seqlens_q != nullptr ? 0 : s.batch * p.seqlen_q) + s.first_row + i;
}

// Rows padded to whole tiles per sequence: how the backward keeps its row statistics and its dQ
// sums. Variable length needs no table: a sequence starts at its first row rounded down, plus one
// tile for every sequence before it, which leaves room for ceil(length / tile) tiles.
struct PaddedRows {
  int32_t tile;

  TILEWISE_FN int64_t first(const Problem& p, int64_t batch) const {
    if (p.cu_seqlens_q == nullptr) return batch * round_up(p.seqlen_q, tile);
    return p.cu_seqlens_q[batch] / tile * tile + batch * tile;
  }
  TILEWISE_FN int64_t count(const Problem& p) const {
    if (p.cu_seqlens_q == nullptr) return p.batch * round_up(p.seqlen_q, tile);
    return (p.seqlen_q / tile + p.batch + 1) * tile;
  }
};

// Rows in use and keys in use are written by the main kernels, everything else by
// common/prepare.cuh.
struct ForwardParams {
  Problem problem;
  TileOrder order;
  Packing packing;     // heads of a tile: 1, or the group size
  int32_t key_tile;    // splits are cut at multiples of it
  float* partial_out;  // splits > 1: [splits, total_rows, heads_q, head_dim_v], normalised
  float* partial_lse;  // splits > 1: [splits, total_rows, heads_q], without the sink
};

struct BackwardParams {
  Problem problem;
  Gradients gradients;
  TileOrder order;
  PaddedRows rows;
  // [heads_q, rows.count]: what the scores and dP start from (mma_sync), see backward_prepare.
  float* row_lse;
  float* row_delta;
  float* dq_sum;   // [heads_q, rows.count, head-dim tile], private order inside a tile
  int32_t* turns;  // deterministic: [heads_q, rows.count / tile] key tiles that have added theirs
};

}  // namespace tilewise::cuda
