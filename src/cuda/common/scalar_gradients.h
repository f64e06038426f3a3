// dsinks and dscale: sums over all rows, in an order that the shapes fix, in two launches. The
// kernel `dsinks` computes partial sums (those of dscale come from the main backward kernels), and
// `reduce_partials` adds them up.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kDsinksThreads = 256;
inline constexpr int kDsinksSharedBytes = kDsinksThreads / 32 * 8;
inline constexpr int kDsinksRows = 256;  // rows per partial sum
inline constexpr int kReduceThreads = 256;
inline constexpr int kReduceSharedBytes = kReduceThreads * 8;

inline int64_t dsinks_row_blocks(const Problem& p) { return ceil_div(total_rows(p), kDsinksRows); }

// First launch: the partial sums of dsinks.
struct DsinksParams {
  Problem problem{};
  Gradients gradients{};
  double* partials = nullptr;  // [heads_q, row_blocks]
  int64_t row_blocks = 0;      // dsinks_row_blocks
  Tangents tangents{};         // of Pass::second; otherwise all are 0
};
inline int64_t dsinks_blocks(const Problem& p) { return p.heads_q * dsinks_row_blocks(p); }

// Second launch: a CTA per head of dsinks, and one more for dscale.
struct ReduceParams {
  const double* dsinks_partials = nullptr;  // [heads, row_blocks]
  int64_t heads = 0;
  int64_t row_blocks = 0;
  float* dsinks = nullptr;  // [heads]; null: not wanted
  const float* dscale_partials = nullptr;
  int64_t dscale_count = 0;
  float* dscale = nullptr;  // null: not wanted
};
inline int64_t reduce_blocks(const ReduceParams& params) {
  return (params.dsinks != nullptr ? params.heads : 0) + (params.dscale != nullptr ? 1 : 0);
}

// scalar_gradients.cuh: template <class Element> dsinks(DsinksParams),
// reduce_partials(ReduceParams)

}  // namespace tilewise::cuda::common
