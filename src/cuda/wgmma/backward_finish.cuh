// The kernel after the main kernel of the backward: converts dq_sum to dQ.
#pragma once

#include "cuda/common/finish_tile.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/fragment.h"
#include "cuda/wgmma/backward_rows.h"

namespace tilewise::cuda::wgmma {

inline constexpr int kFinishThreads = kRowThreads;

// Each warp takes groups of the sums, four values per lane, and all warps write one tile of dQ to
// shared memory.
template <class C>
struct FinishPlan : BackwardSums<C> {
  using Sums = BackwardSums<C>;
  static constexpr int kWarps = kFinishThreads / ptx::kWarpSize;
  static constexpr int kGroups = Sums::kDqSlices * Sums::kDqGroups;
  static constexpr int kGroupsPerWarp = ceil_div(kGroups, kWarps);
  static constexpr int kRowBytes = (C::kHeadDim + 8) * 2;  // 8 more columns avoid bank conflicts
  static constexpr int kDqTileBytes = Sums::kQueries * kRowBytes;
  static constexpr int kSharedBytes = kDqTileBytes + common::finish_tile_bytes(kFinishThreads);
};

template <class C>
inline constexpr int kFinishSharedBytes = FinishPlan<C>::kSharedBytes;

// Row and column of value e of a lane in group `group` of a tile.
template <class C>
struct DqPosition {
  int row;
  int column;

  TILEWISE_DEVICE static DqPosition of(int group, int e, int lane) {
    using Sums = BackwardSums<C>;
    const int across = group / Sums::kDqGroups * 16 + lane / 4 + e / 2 * 8;
    const int along = group % Sums::kDqGroups * 8 + lane % 4 * 2 + e % 2;
    return Sums::kTransposedDq ? DqPosition{along, across} : DqPosition{across, along};
  }
};

// Writes four sums, scaled, to the tile of dQ in shared memory.
template <class C>
TILEWISE_DEVICE void stage_group(const float (&x)[4], int group, float scale,
                                 ptx::SharedAddress shared, int lane) {
  using Plan = FinishPlan<C>;
  const auto at = [&](int e) {
    const auto position = DqPosition<C>::of(group, e, lane);
    return shared + static_cast<uint32_t>(position.row * Plan::kRowBytes + position.column * 2);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t pair =
        tile::pack<typename C::Element>(x[2 * half] * scale, x[2 * half + 1] * scale);
    if constexpr (Plan::kTransposedDq) {
      ptx::st_shared_b16(at(2 * half), static_cast<uint16_t>(pair & 0xffffu));
      ptx::st_shared_b16(at(2 * half + 1), static_cast<uint16_t>(pair >> 16));
    } else {
      ptx::st_shared_b32(at(2 * half), pair);
    }
  }
}

// Writes dQ = scale * sums for the valid rows, a part of dscale = sum(q dQ / scale), and a flag if
// some sum is not finite. The flag also covers unused rows and columns past the last one: a
// needless flag only costs time.
template <class C>
TILEWISE_KERNEL(kFinishThreads, 1)
void backward_finish(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = FinishPlan<C>;
  using Storage = typename C::Element::Storage;
  const Problem& problem = p.problem;
  const RowBlock block = RowBlock::of<Plan::kQueries>(problem);
  const int lane = ptx::lane_index();
  const int warp = ptx::warp_index();
  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  ptx::griddepcontrol_wait();
  const bool needs_reduction = p.dscale_partials != nullptr || p.row_flags.data != nullptr;
  if (block.batch < 0) {
    if (needs_reduction)
      common::finish_tile<kFinishThreads>(p, block.tile, 0.0f, 0.0f, shared + Plan::kDqTileBytes);
    return;
  }

  const float* tile = p.dq_sum + int64_t{block.tile} * Plan::kDqTile;
  uint32_t bits[Plan::kGroupsPerWarp][4];
#pragma unroll
  for (int i = 0; i < Plan::kGroupsPerWarp; ++i) {
    const int group = i * Plan::kWarps + warp;
    if (group < Plan::kGroups) ptx::ld_global_v4_b32(bits[i], tile + (group * 32 + lane) * 4);
  }
  const Sequence s = sequence_of(problem, block.batch);
  const auto rows = static_cast<int32_t>(min<int64_t>(s.band.rows - block.row0, Plan::kQueries));
  const auto columns = static_cast<int32_t>(problem.head_dim);
  const float scale = score_of(problem).scale;
  const Storage* q = static_cast<const Storage*>(problem.q.data) +
                     block.head * problem.q.stride_head + s.row_offset(problem.q, block.row0);
  float dscale = 0.0f;
  float zero = 0.0f;
#pragma unroll
  for (int i = 0; i < Plan::kGroupsPerWarp; ++i) {
    const int group = i * Plan::kWarps + warp;
    if (group >= Plan::kGroups) continue;
    const float x[4] = {ptx::float_of(bits[i][0]), ptx::float_of(bits[i][1]),
                        ptx::float_of(bits[i][2]), ptx::float_of(bits[i][3])};
    stage_group<C>(x, group, scale, shared, lane);
    if (!needs_reduction) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      zero = ptx::fma(x[e], 0.0f, zero);
      const auto position = DqPosition<C>::of(group, e, lane);
      if (p.dscale_partials != nullptr && position.row < rows && position.column < columns)
        dscale = ptx::fma(to_float(q[position.row * problem.q.stride_row + position.column]), x[e],
                          dscale);
    }
  }
  ptx::sync_block();
  const tilewise_tensor& view = p.gradients.dq;
  if (view.data != nullptr) {
    Storage* const dq = static_cast<Storage*>(view.data) + block.head * view.stride_head +
                        s.row_offset(view, block.row0);
    constexpr int kChunks = C::kHeadDim / 8;
#pragma unroll 2
    for (int i = ptx::thread_index(); i < Plan::kQueries * kChunks; i += kFinishThreads) {
      const int row = i / kChunks;
      const int column = i % kChunks * 8;
      if (row >= rows || column >= columns) continue;
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, shared + static_cast<uint32_t>(row * Plan::kRowBytes + column * 2));
      ptx::st_global_v4_b32(dq + row * view.stride_row + column, x);
    }
  }
  if (needs_reduction)
    common::finish_tile<kFinishThreads>(p, block.tile, dscale, zero, shared + Plan::kDqTileBytes);
}

}  // namespace tilewise::cuda::wgmma
