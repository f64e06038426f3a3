// The splits or parts of a forward become out and lse.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineSharedBytes = kCombineThreads * 16;

inline constexpr int kRowsOfCombine = 8;
inline constexpr int kCombineByWarpsThreads = kRowsOfCombine * 32;

// Rows of heads: of the splits of a sequence, of its equal parts, or of the parts of shared works.
TILEWISE_FN int64_t combined_rows(const ForwardParams& p) {
  if (p.shares.any()) return int64_t{p.shares.works} * p.row_tile;
  return p.parts.any() ? p.problem.batch * p.order.heads * p.packed_rows
                       : total_rows(p.problem) * p.problem.heads_q;
}

// Whether a warp takes a row, instead of a block, of which 16 thousand take 50 us. (H200, of 4
// heads and 2k causal rows 57 -> 37 us; but of 1024 rows in all 38 -> 40.)
inline bool combines_by_warps(const ForwardParams& p) {
  if (p.shares.any()) return true;
  constexpr int64_t kMany = 2048;
  constexpr int32_t kFew = 32;  // a lane has the weight of one
  return !p.parts.any() && p.order.splits <= kFew && combined_rows(p) >= kMany &&
         p.problem.head_dim_v % 4 == 0;
}

inline int64_t combine_blocks(const ForwardParams& p) {
  return combines_by_warps(p) ? ceil_div(combined_rows(p), kRowsOfCombine) : combined_rows(p);
}

// combine.cuh: template <class Element, class Row> combine(ForwardParams), combine_by_warps

}  // namespace tilewise::cuda::common
