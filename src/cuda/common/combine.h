// The splits or parts of a forward become out and lse.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineSharedBytes = kCombineThreads * 16;

// A block takes one row of one head: of the splits of a sequence, or of its equal parts.
inline int64_t combine_blocks(const ForwardParams& p) {
  return p.parts.any() ? p.problem.batch * p.order.heads * p.packed_rows
                       : total_rows(p.problem) * p.problem.heads_q;
}

// combine.cuh: template <class Element, class Row> combine(ForwardParams)

}  // namespace tilewise::cuda::common
