// The factors that undo the scaling of queries. With a float8 cache each query is multiplied by a
// power of two (forward_queries.h); with any other cache queries are used unchanged.
#pragma once

#include <cfloat>

#include "cuda/tile/fragment.h"

namespace tilewise::cuda::mma_sync {

// Products of a lane's rows are multiplied by these to undo the scaling of their queries.
struct NoDescale {
  template <class Sums>
  TILEWISE_DEVICE void apply(Sums&) const {}
};
template <int kRows>
struct RowDescales {
  float x[kRows][2];

  template <int kColumns>
  TILEWISE_DEVICE void apply(tile::Sums<kRows, kColumns>& s) const {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s.x[m][n][e] *= x[m][e / 2];
      }
    }
  }
};

// The positive factor from scores to exponents of 2: the same in all rows, or one per row.
struct UniformScale {
  float x;

  template <class Descales>
  TILEWISE_DEVICE UniformScale(float scale, const Descales&) : x(scale) {}
  TILEWISE_DEVICE float at(int, int) const { return x; }
};
template <int kRows>
struct RowScales {
  float x[kRows][2];

  TILEWISE_DEVICE RowScales(float scale, const RowDescales<kRows>& descales) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float product = scale * descales.x[m][h];
        x[m][h] = product < FLT_MIN ? FLT_MIN : product;  // NaN stays NaN
      }
    }
  }
  TILEWISE_DEVICE float at(int m, int h) const { return x[m][h]; }
};

}  // namespace tilewise::cuda::mma_sync
