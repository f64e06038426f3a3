// The statistics of rows that the second derivatives read (SecondParams).
#pragma once

#include "cuda/mma_sync/backward_prepare.cuh"
#include "cuda/mma_sync/second_statistics.h"

namespace tilewise::cuda::mma_sync {

// Returns sum + the dot product of 8 columns of two tensors, from column 0 of `x` and `y` on; a
// null tensor is 0.
template <class C>
TILEWISE_DEVICE float add_dot(float sum, const tilewise_tensor& x, const tilewise_tensor& y,
                              const Sequence& s, int64_t head, int64_t row, int column,
                              int columns) {
  using Storage = typename C::Element::Storage;
  if (x.data == nullptr || y.data == nullptr) return sum;
  const auto load = [&](uint32_t (&to)[4], const tilewise_tensor& from) {
    load_chunk<C>(
        to,
        static_cast<const Storage*>(from.data) + s.row_offset(from, row) + head * from.stride_head,
        column, columns, true);
  };
  uint32_t of_x[4];
  uint32_t of_y[4];
  load(of_x, x);
  load(of_y, y);
  return common::add_products<typename C::Element>(sum, of_x, of_y);
}

TILEWISE_DEVICE float dlse_at(const float* dlse, int64_t stride_batch, int64_t stride_head,
                              const Sequence& s, int64_t head, int64_t row) {
  return dlse == nullptr ? 0.0f : dlse[s.lse_offset(stride_batch, row) + head * stride_head];
}

// Grid: heads_q * rows.count / rows.tile. Every lane of a row has 16 bytes of it.
template <class C>
TILEWISE_KERNEL(kPrepareThreads, 1)
void second_prepare(TILEWISE_PARAMETER SecondParams p) {
  constexpr int kLanes = C::kHeadDim * C::Element::kBytes / 16;
  static_assert(kLanes <= ptx::kWarpSize && C::kForward.rows() % (kPrepareThreads / kLanes) == 0);
  const Problem& problem = p.problem;
  const Tangents& t = p.tangents;
  const Gradients& g = p.gradients;
  const int64_t tiles = p.rows.count(problem) / p.rows.tile;
  const PaddedRows::TileStart start = p.rows.locate(problem, ptx::block_index() % tiles);
  if (start.batch < 0) return;
  const int64_t head = ptx::block_index() / tiles;
  const Sequence s = sequence_of(problem, start.batch);
  const int columns = static_cast<int>(problem.head_dim_v);
  const int column = ptx::thread_index() % kLanes * (16 / C::Element::kBytes);
  const int64_t end = start.row0 + C::kForward.rows();
#pragma unroll 1
  for (int64_t row = start.row0 + ptx::thread_index() / kLanes; row < end;
       row += kPrepareThreads / kLanes) {
    const bool in_use = row < s.band.rows;
    float delta = 0.0f;
    float second_delta = 0.0f;
    if (in_use) {
      delta = add_dot<C>(0.0f, problem.out, t.dout, s, head, row, column, columns);
      second_delta = add_dot<C>(0.0f, t.out, t.dout, s, head, row, column, columns);
      second_delta = add_dot<C>(second_delta, problem.out, g.dout, s, head, row, column, columns);
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes != 0; lanes /= 2) {
      delta += ptx::shuffle_xor(delta, lanes);
      second_delta += ptx::shuffle_xor(second_delta, lanes);
    }
    if (column != 0) continue;
    LogSum sum;
    float lse_tangent = 0.0f;
    if (in_use) {
      sum = common::log_sum_at(
          problem, s.lse_offset(problem.lse_stride_batch, row) + head * problem.lse_stride_head);
      lse_tangent = t.lse[s.lse_offset(t.lse_stride_batch, row) + head * t.lse_stride_head];
      delta -= dlse_at(t.dlse, t.dlse_stride_batch, t.dlse_stride_head, s, head, row);
      second_delta -= dlse_at(g.dlse, g.dlse_stride_batch, g.dlse_stride_head, s, head, row);
    }
    const int64_t at = ptx::block_index() * p.rows.tile + (row - start.row0);
    const bool weighs = in_use && sum.lse != kMinusInfinity;
    p.row_minus_lse[at] = weighs ? -sum.lse : kMinusInfinity;
    p.row_minus_low[at] = -sum.low * kLog2e;
    p.row_lse_tangent[at] = lse_tangent;
    p.row_delta[at] = delta;
    p.row_second_delta[at] = second_delta;
  }
}

}  // namespace tilewise::cuda::mma_sync
