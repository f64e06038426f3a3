// How the warps of a backward CTA divide its products, and the layout of its shared memory.
#pragma once

#include "cuda/common/finish_tile.h"
#include "cuda/mma_sync/config.h"
#include "cuda/params.h"

namespace tilewise::cuda::mma_sync {

inline constexpr int kPrepareThreads = 128;
inline constexpr int kFinishThreads = 128;
inline constexpr int kFinishSharedBytes = common::finish_tile_bytes(kFinishThreads);

template <class C>
class MaskedRows;  // backward_mask.cuh
template <class C>
constexpr int masked_rows_bytes() {
  if constexpr (C::kMasked) return sizeof(MaskedRows<C>);
  return 0;
}

// A CTA owns kKeys keys and walks the tiles of kQueries query rows that see them. Warp w owns 32
// keys (w / query_warps) and shares the queries of a tile with the other warps of these keys.
template <class C>
struct BackwardPlan {
  static constexpr arch::BackwardTile kTile = C::kBackward;
  static constexpr int kBytes = C::Element::kBytes;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kKeys = kTile.keys();
  static constexpr int kQueries = kTile.queries;
  static constexpr int kStages = kTile.stages;
  static constexpr int kStep = 32 / kBytes;  // elements of the summed index per step of a product

  // S^T = K Q^T and dP^T = V dO^T: 32 keys x kWarpQueries per warp, or per kColumnWarps warps.
  static constexpr int kColumnWarps = kTile.column_warps;
  static constexpr int kWarpQueries = kQueries / (kTile.query_warps / kColumnWarps);
  static_assert(kWarpQueries == 8 || kWarpQueries % 16 == 0);
  // dK = dS^T Q and dV = P^T dO: 32 keys x kColumns per warp. The warp takes P and dS of its own
  // queries from registers and those of the other warps from shared memory, or all of them from
  // shared memory when its own queries are fewer than a step takes, or when it has column warps.
  static constexpr int kOwnSteps = kColumnWarps > 1 ? 0 : kWarpQueries / kStep;
  // Steps whose left operands a warp holds at the same time.
  static constexpr int kHeldSteps = kBytes == 2 ? 1 : max(1, kOwnSteps);
  static_assert(kOwnSteps % kHeldSteps == 0 && (kQueries / kStep - kOwnSteps) % kHeldSteps == 0);
  // With an early barrier, 4-byte elements would need too many registers, so the warp's own dS
  // comes from shared memory as well.
  static constexpr bool kOwnDsInRegisters = kBytes == 2 || !kTile.early_barrier;
  static constexpr bool kShareP = kTile.query_warps > 1;
  // Computing the addresses of the score tiles anew in every step saves registers, except in one
  // instance, which spills less when they are kept (ptxas of CUDA 13.0).
  static constexpr bool kRecomputeScoreOffsets =
      kBytes == 4 || kShareP || !C::Arch::kVectorReduction;
  static constexpr int kColumns = C::kHeadDim / kTile.query_warps;
  static_assert(kColumns % 16 == 0);

  // dQ = dS K: kDqRows x kDqColumns per warp; neighbouring warps have neighbouring columns.
  static constexpr bool dq_fits(int rows) {
    const int row_blocks = kQueries / rows;
    return kQueries % rows == 0 && kWarps % row_blocks == 0 &&
           C::kHeadDim / (kWarps / row_blocks) % 16 == 0;
  }
  static constexpr int kDqRows = dq_fits(32) ? 32 : 16;
  static constexpr int kDqWarpsPerRow = kWarps / (kQueries / kDqRows);
  static constexpr int kDqColumns = C::kHeadDim / kDqWarpsPerRow;
  static_assert(dq_fits(kDqRows));
  static_assert(kBytes == 2 || kDqColumns == 16 || kDqColumns % 32 == 0);  // GatherOffsets
  // A warp sums its columns in kDqPasses passes: beside dK and dV there are registers for some 96
  // sums per lane.
  static constexpr int kDqPasses = kDqRows * kDqColumns / 32 > 96 ? 2 : 1;
  static constexpr int kDqPassColumns = kDqColumns / kDqPasses;
  // Floats of a tile of dq_sum.
  static constexpr int kDqTile = kQueries * C::kHeadDim;

  // Layout of shared memory: sizes in bytes, then byte offsets from kK on.
  static constexpr int kRowBytes = C::kHeadDim * kBytes;
  static constexpr int kScoreRowBytes = kQueries * kBytes;
  static constexpr int kKeyTileBytes = kKeys * kRowBytes;
  static constexpr int kRowTileBytes = kQueries * kRowBytes;
  static constexpr int kScoreTileBytes = kKeys * kScoreRowBytes;
  static constexpr int kScoreTiles = kStages == 3 ? 2 : 1;
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyTileBytes;
  static constexpr int kRowTiles = kV + kKeyTileBytes;  // per stage: Q, dO
  static constexpr int row_tiles(int stage) {
    return kRowTiles + (kStages > 1 ? stage * 2 * kRowTileBytes : 0);
  }
  static constexpr int kDS = kRowTiles + kStages * 2 * kRowTileBytes;
  static constexpr int kP = kDS + kScoreTiles * kScoreTileBytes;
  static constexpr int kParts = kP + (kShareP ? kScoreTiles * kScoreTileBytes : 0);
  // Of S or dP, per warp (backward_column_warps.cuh).
  static constexpr int kPartBytes = kColumnWarps > 1 ? 32 * kWarpQueries * 4 : 0;
  static constexpr int kStatistics = kParts + kWarps * kPartBytes;
  // Per tile: row_lse, row_delta, TileRecord. With column warps those of the next tile arrive while
  // those of this one are in use.
  static constexpr int kStatisticsBytes = 2 * kQueries * 4 + 16;
  static constexpr int kStatisticsStages = kColumnWarps > 1 ? 2 : kStages;
  // Groups of copies that may be in flight when a step begins: column warps wait for dO later.
  static constexpr int kInFlight = kColumnWarps > 1 ? 1 : 0;
  static constexpr int kKeyTile = kStatistics + kStatisticsStages * kStatisticsBytes;
  static constexpr int kMask = kKeyTile + 48;
  static constexpr int kSharedBytes = kMask + masked_rows_bytes<C>();
  static_assert(kColumnWarps == 1 || kStages == 1);
  static_assert(kSharedBytes <= arch::limits_of(C::Arch::kTable).shared_bytes);
};

template <class C>
inline constexpr int kBackwardSharedBytes = BackwardPlan<C>::kSharedBytes;

// dq_sum holds a row tile as the sums of one warp after the other. This is the index of value e of
// the 16 x 8 block (m, n) in the sums of a warp.
template <class C>
TILEWISE_FN int dq_index(int m, int n, int e, int lane) {
  const int block = m * (BackwardPlan<C>::kDqColumns / 8) + n;
  return C::Arch::kVectorReduction ? (block * 32 + lane) * 4 + e : (block * 4 + e) * 32 + lane;
}

// Row and column in a tile of dQ of value e of a warp's block (m, n). Rows of 4-byte elements come
// out of the transposed dS tile in the order in which Operands store them.
template <class C>
TILEWISE_FN int dq_row(int warp, int m, int e, int lane) {
  const int g = lane / 4;
  const int row = C::Element::kBytes == 2 ? g : g % 4 * 2 + g / 4;
  return warp / BackwardPlan<C>::kDqWarpsPerRow * BackwardPlan<C>::kDqRows + m * 16 + e / 2 * 8 +
         row;
}
template <class C>
TILEWISE_FN int dq_column(int warp, int n, int e, int lane) {
  return warp % BackwardPlan<C>::kDqWarpsPerRow * BackwardPlan<C>::kDqColumns + n * 8 +
         lane % 4 * 2 + e % 2;
}

}  // namespace tilewise::cuda::mma_sync
