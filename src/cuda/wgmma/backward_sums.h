// Definitions that the three kernels of the backward share: query tiles, row statistics and the
// layout of dq_sum.
#pragma once

#include "cuda/params.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

template <class C>
struct BackwardSums {
  static constexpr int kQueries = C::kBackward.queries;
  static_assert(kQueries % 16 == 0);

  // S starts at -lse / scale and dP at -delta, which saves the subtractions and the registers for
  // statistics between the products (D128: 562 to 632 TFLOP/s). The general form cannot do so,
  // because it changes scores before lse is subtracted.
  static constexpr bool kPreload = C::kBackward.preload && !C::kGeneral;

  // dQ^T = K^T dS^T with 64 columns per warpgroup, or dQ = dS K with 64 rows per warpgroup.
  static constexpr bool kTransposedDq = kQueries != 128;
  // A tile of dq_sum is a sequence of slices, each of which one warp adds: 16 columns of all rows
  // of the tile (transposed), or 16 rows of all columns. With g = lane / 4 and t = lane % 4, value
  // e of a lane's group i of four has the indices
  //
  //   16 slice + g + 8 (e / 2)    in the dimension that is cut into slices
  //   8 i + 2 t + e % 2           in the other one
  static constexpr int kDqTile = kQueries * C::kHeadDim;
  static constexpr int kDqSlices = (kTransposedDq ? C::kHeadDim : kQueries) / 16;
  static constexpr int kDqGroups = (kTransposedDq ? kQueries : C::kHeadDim) / 8;
  static constexpr int kDqSliceBytes = kDqGroups * 512;
  static_assert(kDqSlices * kDqSliceBytes == kDqTile * 4);

  // Position of a row's statistic in its tile. Preloaded statistics are in the order in which a
  // thread reads them: in each 16 rows, queries 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1 are adjacent.
  static TILEWISE_FN int statistic_position(int row) {
    if (!kPreload) return row;
    return (row & ~15) + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }
};

}  // namespace tilewise::cuda::wgmma
