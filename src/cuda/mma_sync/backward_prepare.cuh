// Before the backward: statistics of the rows, zeros where dQ is summed.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/mma_sync/backward_plan.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::mma_sync {

// A row that takes part in nothing: exp2(anything - 1e30) = 0, and no infinity meets another.
inline constexpr float kNoRow = -1e30f;

// The tile of rows of one query head that a block of a row kernel has.
template <class C>
struct RowBlock {
  int64_t head;
  int64_t batch;  // -1: nothing to do
  int64_t row0;
  int64_t tile;  // among all heads' tiles

  TILEWISE_DEVICE static RowBlock of(const BackwardParams& p) {
    constexpr PaddedRows kPadded{BackwardPlan<C>::kQueries};
    const int64_t tiles = kPadded.count(p.problem) / kPadded.tile;
    const int64_t block = ptx::block_index();
    const PaddedRows::Place place = kPadded.locate(p.problem, block % tiles);
    return {block / tiles, place.batch, place.row0, block};
  }
};

// Eight or four elements, 16 bytes.
template <class Element>
TILEWISE_DEVICE void unpack(float (&x)[16 / Element::kBytes], const uint32_t (&r)[4]) {
#pragma unroll
  for (int i = 0; i < 16 / Element::kBytes; ++i) {
    if constexpr (Element::kBytes == 4)
      x[i] = ptx::float_of(r[i]);
    else
      x[i] = to_float(typename Element::Storage{
          static_cast<uint16_t>(i % 2 == 0 ? r[i / 2] & 0xffffu : r[i / 2] >> 16)});
  }
}

// Elements of a row from `column` on; 0 past the last.
template <class C>
TILEWISE_DEVICE void load_chunk(float (&x)[16 / C::Element::kBytes],
                                const typename C::Element::Storage* row, int column, int columns,
                                bool aligned) {
  constexpr int kPerChunk = 16 / C::Element::kBytes;
  if (!C::kGeneral || aligned) {
    uint32_t r[4] = {0, 0, 0, 0};
    if (column < columns) ptx::ld_global_v4_b32(r, row + column);
    unpack<typename C::Element>(x, r);
  } else {
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i)
      x[i] = column + i < columns ? to_float(row[column + i]) : 0.0f;
  }
}

// The lanes of a row.
template <class C>
struct RowLanes {
  static constexpr int kPerChunk = 16 / C::Element::kBytes;
  static constexpr int kChunks = C::kHeadDim / kPerChunk;
  static constexpr int kLanes = min(32, kChunks & -kChunks);
  static constexpr int kColumns = kChunks / kLanes;

  TILEWISE_DEVICE static float sum(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask != 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
    return x;
  }
};

// row_lse = -lse in units of log2, row_delta = -delta = dlse - sum(out dout).
template <class C>
TILEWISE_KERNEL(kPrepareThreads, 1)
void backward_prepare(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = BackwardPlan<C>;
  using Lanes = RowLanes<C>;
  using Storage = typename C::Element::Storage;
  const RowBlock<C> block = RowBlock<C>::of(p);
  if (block.batch < 0) return;
  const Problem& problem = p.problem;
  const Sequence s = sequence_of(problem, block.batch);
  const int columns = static_cast<int>(problem.head_dim_v);
  const bool aligned = rows_aligned(problem.out, columns, C::Element::kBytes) &&
                       rows_aligned(p.gradients.dout, columns, C::Element::kBytes);
  const auto* out = static_cast<const Storage*>(problem.out.data);
  const auto* d_out = static_cast<const Storage*>(p.gradients.dout.data);
  const int lane = ptx::thread_index() % Lanes::kLanes;
  constexpr int kRowsPerPass = kPrepareThreads / Lanes::kLanes;

  for (int r = ptx::thread_index() / Lanes::kLanes; r < Plan::kQueries; r += kRowsPerPass) {
    const int64_t row = block.row0 + r;
    const bool in_use = row < s.band.rows;
    float delta = 0.0f;
    if (in_use) {
      const Storage* o =
          out + s.row_offset(problem.out, row) + block.head * problem.out.stride_head;
      const Storage* d =
          d_out + s.row_offset(p.gradients.dout, row) + block.head * p.gradients.dout.stride_head;
#pragma unroll
      for (int i = 0; i < Lanes::kColumns; ++i) {
        float x[Lanes::kPerChunk];
        float y[Lanes::kPerChunk];
        const int column = (i * Lanes::kLanes + lane) * Lanes::kPerChunk;
        load_chunk<C>(x, o, column, columns, aligned);
        load_chunk<C>(y, d, column, columns, aligned);
#pragma unroll
        for (int e = 0; e < Lanes::kPerChunk; ++e) delta = ptx::fma(x[e], y[e], delta);
      }
    }
    delta = Lanes::sum(delta);
    if (lane != 0) continue;
    float lse = kNoRow;
    if (in_use) {
      const float l = problem.lse[s.lse_offset(problem.lse_stride_batch, row) +
                                  block.head * problem.lse_stride_head];
      if (l != kMinusInfinity) lse = -l * kLog2e;
      if (p.gradients.dlse != nullptr)
        delta -= p.gradients.dlse[s.lse_offset(p.gradients.dlse_stride_batch, row) +
                                  block.head * p.gradients.dlse_stride_head];
    }
    const int64_t at = block.tile * Plan::kQueries + r;
    p.row_lse[at] = lse;
    p.row_delta[at] = lse == kNoRow ? 0.0f : -delta;
  }

  const uint32_t zero[4] = {0, 0, 0, 0};
  if (p.dq_sum != nullptr) {
    float* sums = p.dq_sum + block.tile * Plan::kDqTile;
    for (int i = ptx::thread_index() * 4; i < Plan::kDqTile; i += kPrepareThreads * 4)
      ptx::st_global_v4_b32(sums + i, zero);
  }
  if (p.turns != nullptr && ptx::thread_index() == 0) p.turns[block.tile] = 0;
}

}  // namespace tilewise::cuda::mma_sync
