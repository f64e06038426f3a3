// The kernel before the main kernel of the backward: row statistics, descriptors of work tiles, and
// zeros in dq_sum.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/common/far_rows.h"
#include "cuda/common/out.h"
#include "cuda/common/row_statistics.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_rows.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

inline constexpr int kPrepareThreads = kRowThreads;

// The rows of a tile are distributed over the threads, kLanes lanes per row, with all loads in
// flight together.
template <class C>
struct RowLanes {
  static constexpr int kChunks = C::kHeadDimV / 8;
  static constexpr int kLanes = min(32, kChunks & -kChunks);
  static constexpr int kColumns = kChunks / kLanes;
  static constexpr int kRowsPerPass = kPrepareThreads / kLanes;
  // Rows per CTA: as few as fill one pass, if they divide the rows of a tile. Many small CTAs keep
  // more loads in flight than few large ones (D128: 70 us instead of 85 us for 16k rows of 16
  // heads).
  static constexpr int kMinRows = max(16, kRowsPerPass);
  static constexpr int kRows =
      BackwardSums<C>::kQueries % kMinRows == 0 ? kMinRows : BackwardSums<C>::kQueries;
  static constexpr int kPasses = ceil_div(kRows, kRowsPerPass);
  // With one pass, 5 CTAs have enough loads in flight. With the 52 registers that ptxas would
  // choose only 4 fit, which takes 80 us instead of 77 (H200, D128, 16k rows of 16 heads). Several
  // passes need 80 registers, because the loads of all passes are in flight together.
  static constexpr int kMinBlocksPerSm = kPasses == 1 ? 5 : 1;
};

// CTAs of the prepare kernel that share a tile of rows.
template <class C>
inline constexpr int kPrepareSplits = BackwardSums<C>::kQueries / RowLanes<C>::kRows;

// The value at which S starts, or which is added to it (BackwardSums), for a row with this lse.
template <class C>
TILEWISE_DEVICE float row_lse(float lse, float scale_log2) {
  const float x = lse == kMinusInfinity ? common::kUnusedRow : -lse * kLog2e;
  if constexpr (BackwardSums<C>::kPreload) {
    const float quotient = x / scale_log2;
    return quotient > 1e38f ? 1e38f : quotient < -1e38f ? -1e38f : quotient;
  }
  return x;
}

// Writes the descriptors of the main kernel's work tiles, and zeroes its tile counter and flags.
template <class C>
TILEWISE_DEVICE void describe_tiles(const BackwardParams& p, int32_t block) {
  constexpr int32_t kCluster = C::kBackward.cluster_size;
  const int32_t i = block * kPrepareThreads + ptx::thread_index();
  if (i == 0 && p.tile_counter != nullptr) *p.tile_counter = 0;
  if (i >= p.num_tiles * kCluster) return;
  TileDescriptor descriptor = DescriptorBuilder<C>::make(p, i);
  descriptor.index = i / kCluster;
  p.descriptors[i] = descriptor;
  if (p.key_flags.data != nullptr) p.key_flags.data[descriptor.index] = 0;
}

// Writes the descriptors, zeros in dq_sum, and the row statistics in the layout of BackwardSums:
// row_lse, as the function of that name gives it, and row_delta = -delta = dlse - sum(out dout).
template <class C>
TILEWISE_KERNEL(kPrepareThreads, RowLanes<C>::kMinBlocksPerSm)
void backward_prepare(TILEWISE_PARAMETER BackwardParams p) {
  using Sums = BackwardSums<C>;
  using Lanes = RowLanes<C>;
  using Storage = typename C::Element::Storage;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int thread = ptx::thread_index();
  const Problem& problem = p.problem;
  const float scale_log2 = exponent_scale(score_of(problem).scale);
  const auto first_block = static_cast<int32_t>(
      ceil_div(int64_t{p.num_tiles} * C::kBackward.cluster_size, kPrepareThreads));
  if (ptx::block_index() < first_block) {
    describe_tiles<C>(p, static_cast<int32_t>(ptx::block_index()));
    return;
  }
  const RowBlock block = RowBlock::of<Sums::kQueries, kPrepareSplits<C>>(problem, first_block);
  const int lane = thread % Lanes::kLanes;
  const int first = block.split * Lanes::kRows + thread / Lanes::kLanes;  // row of the tile
  const int end = (block.split + 1) * Lanes::kRows;
  const auto columns = static_cast<int>(problem.head_dim_v);
  const bool wide = C::kGeneral && widens_out<Storage>(problem);
  const bool exists = block.batch >= 0;
  Sequence s{};
  int32_t rows = 0;  // valid rows of the tile before `end`
  if (exists) {
    s = sequence_of(problem, block.batch);
    rows = static_cast<int32_t>(clamp(s.band.rows - block.row0, 0, end));
  }

  float lse[Lanes::kPasses];
  float dlse[Lanes::kPasses];
  uint32_t x[Lanes::kPasses][Lanes::kColumns][4];
  uint32_t y[Lanes::kPasses][Lanes::kColumns][4];
#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int row = first + pass * Lanes::kRowsPerPass;
    const Storage* out = nullptr;
    const Storage* dout = nullptr;
    lse[pass] = kMinusInfinity;
    dlse[pass] = 0.0f;
    if (row < rows) {
      if (lane == 0) {
        lse[pass] = problem.lse[s.lse_offset(problem.lse_stride_batch, block.row0 + row) +
                                block.head * problem.lse_stride_head];
        if (p.gradients.dlse != nullptr)
          dlse[pass] =
              p.gradients.dlse[s.lse_offset(p.gradients.dlse_stride_batch, block.row0 + row) +
                               block.head * p.gradients.dlse_stride_head];
      }
      out = static_cast<const Storage*>(problem.out.data) + block.head * problem.out.stride_head +
            s.row_offset(problem.out, block.row0 + row);
      dout = static_cast<const Storage*>(p.gradients.dout.data) +
             block.head * p.gradients.dout.stride_head +
             s.row_offset(p.gradients.dout, block.row0 + row);
    }
#pragma unroll
    for (int i = 0; i < Lanes::kColumns; ++i) {
      const int column = (i * Lanes::kLanes + lane) * 8;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[pass][i][e] = y[pass][i][e] = 0;
      if (row < rows && column < columns) {
        if (!wide) ptx::ld_global_v4_b32(x[pass][i], out + column);
        ptx::ld_global_v4_b32(y[pass][i], dout + column);
      }
    }
  }

  constexpr int kSums = Lanes::kRows * C::kHeadDim;
  float* const sums = p.dq_sum + int64_t{block.tile} * Sums::kDqTile + block.split * kSums;
  const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kSums; i += kPrepareThreads * 4) {
    if (i + thread * 4 < kSums) ptx::st_global_v4_b32(sums + i + thread * 4, zeros);
  }
  if (!exists) return;

#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int row = first + pass * Lanes::kRowsPerPass;
    float delta = 0.0f;
    if (!wide) {
#pragma unroll
      for (int i = 0; i < Lanes::kColumns; ++i)
        delta = common::add_products<typename C::Element>(delta, x[pass][i], y[pass][i]);
    } else if (row < rows) {
      const float* const out = static_cast<const float*>(problem.out.data) +
                               block.head * problem.out.stride_head +
                               s.row_offset(problem.out, block.row0 + row);
#pragma unroll
      for (int i = 0; i < Lanes::kColumns; ++i) {
        const int column = (i * Lanes::kLanes + lane) * 8;
        if (column < columns)
          delta =
              common::add_wide_products<typename C::Element>(delta, out + column, 0, 8, y[pass][i]);
      }
    }
#pragma unroll
    for (int mask = Lanes::kLanes / 2; mask != 0; mask /= 2) delta += ptx::shuffle_xor(delta, mask);
    if (lane != 0 || row >= end) continue;
    const int64_t at = int64_t{block.tile} * Sums::kQueries + Sums::statistic_position(row);
    p.row_lse[at] = row_lse<C>(lse[pass], scale_log2);
    if constexpr (C::kGeneral) {
      const int64_t padded_row = int64_t{block.tile} * Sums::kQueries + row;
      LogSum sum{lse[pass], 0.0f};
      if (problem.lse_low != nullptr && common::is_far_row<typename C::Element>(sum.lse))
        sum.low = problem.lse_low[s.lse_offset(problem.lse_stride_batch, block.row0 + row) +
                                  block.head * problem.lse_stride_head];
      if (common::store_row_origin<typename C::Element>(p, padded_row, sum)) p.row_lse[at] = 0.0f;
    }
    p.row_delta[at] = lse[pass] == kMinusInfinity ? 0.0f : dlse[pass] - delta;
  }
}

}  // namespace tilewise::cuda::wgmma
