// What the three kernels of a backward agree on: tiles of rows, their statistics and the sums of
// dQ.
#pragma once

#include "cuda/params.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

template <class C>
struct BackwardSums {
  static constexpr int kQueries = C::kBackward.queries;
  static_assert(kQueries % 16 == 0);

  // S starts at -lse / scale and dP at -delta: no subtraction, and no registers for statistics
  // between the products (D128: 562 to 632 TFLOP/s). Scores of the general form are changed before
  // lse is subtracted.
  static constexpr bool kPreload = C::kBackward.preload && !C::kGeneral;

  // dQ^T = K^T dS^T, a warpgroup has 64 columns, or dQ = dS K, a warpgroup has 64 rows.
  static constexpr bool kTransposedDq = kQueries != 128;
  // A tile of dq_sum: the sums of one warp after the other, 16 columns of all rows of the tile
  // (transposed) or 16 rows of all columns. Value e of a lane's group i of four is, with g = lane /
  // 4 and t = lane % 4, index 16 part + g + 8 (e / 2) of the one and 8 i + 2 t + e % 2 of the
  // other.
  static constexpr int kDqTile = kQueries * C::kHeadDim;
  static constexpr int kDqSlices = (kTransposedDq ? C::kHeadDim : kQueries) / 16;
  static constexpr int kDqGroups = (kTransposedDq ? kQueries : C::kHeadDim) / 8;
  static constexpr int kDqSliceBytes = kDqGroups * 512;
  static_assert(kDqSlices * kDqSliceBytes == kDqTile * 4);

  // Where the statistic of a row of a tile lies. Preloaded ones are in the order in which a thread
  // takes them: of each 16 rows, queries 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1 next to each other.
  static TILEWISE_FN int statistic_place(int row) {
    if (!kPreload) return row;
    return (row & ~15) + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }
};

}  // namespace tilewise::cuda::wgmma
