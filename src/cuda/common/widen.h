// The copies that a forward of float8 queries needs (attention/widened_queries.h), in one launch
// before the forward.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kWidenThreads = 256;
inline constexpr int kWidenRows = kWidenThreads / 32;  // of a CTA: one per warp

struct WidenParams {
  Problem problem{};
  Problem wide{};  // with q and k_descale in the workspace
};

// CTAs for the rows.
TILEWISE_FN int64_t widen_row_blocks(const Problem& p) {
  return ceil_div(total_rows(p), kWidenRows);
}
// One more CTA computes the factors, if there are any.
inline int64_t widen_blocks(const Problem& p) {
  return widen_row_blocks(p) + (p.q_descale != nullptr ? 1 : 0);
}

// widen.cuh: widen(WidenParams)

}  // namespace tilewise::cuda::common
