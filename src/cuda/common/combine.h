// The splits of a forward become out and lse.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineSharedBytes = kCombineThreads * 16;

struct CombineParams {
  Problem problem{};
  int32_t splits = 0;
  const float* partial_out = nullptr;  // [splits, partial_rows, heads_q, head_dim_v], normalised;
                                       // anything where the lse of the split is -inf
  const float* partial_lse = nullptr;  // [splits, partial_rows, heads_q], without the sink
  SplitRule rule;                      // least > 0: a sequence has `parts` of them
  int32_t pitch = 0;                   // `partial_rows`
};

// A block takes one row of one head.
inline int64_t combine_blocks(const Problem& p) { return total_rows(p) * p.heads_q; }

// combine.cuh: template <class Element> combine(CombineParams)

}  // namespace tilewise::cuda::common
