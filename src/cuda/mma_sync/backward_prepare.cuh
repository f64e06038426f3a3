// Runs before the main kernel of the backward: computes row_lse and row_delta of each query row,
// and zeroes the sums of dQ.
//
// One CTA per tile of query rows and query head. It zeroes its tile of dq_sum; then groups of
// kLanes lanes each read rows of out and dout, kInFlight passes at a time, and reduce sum(out dout)
// with shuffles. Nothing passes through shared memory.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/far_rows.h"
#include "cuda/common/out.h"
#include "cuda/common/row_statistics.h"
#include "cuda/mma_sync/backward_plan.h"
#include "cuda/mma_sync/row_alignment.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::mma_sync {

// The row tile and query head of a CTA of the row kernels. Grids have fewer than 2^31 CTAs, so 32
// bits suffice for everything except the first row of a varlen sequence.
template <class C>
struct RowBlock {
  int32_t head;
  int32_t batch;  // -1: nothing to do
  int32_t row0;
  int32_t tile;  // among the tiles of all heads

  TILEWISE_DEVICE static RowBlock of(const BackwardParams& p) {
    constexpr PaddedRows kPadded{BackwardPlan<C>::kQueries};
    const Problem& problem = p.problem;
    const auto block = static_cast<uint32_t>(ptx::block_index());
    RowBlock r;
    r.tile = static_cast<int32_t>(block);
    if (problem.cu_seqlens_q == nullptr) {
      constexpr uint32_t kTile = BackwardPlan<C>::kQueries;
      const uint32_t tiles = (static_cast<uint32_t>(problem.seqlen_q) + kTile - 1) / kTile;
      const auto sequences = static_cast<uint32_t>(problem.batch);
      const uint32_t pair = block / tiles;
      r.row0 = static_cast<int32_t>((block - pair * tiles) * kTile);
      r.head = static_cast<int32_t>(pair / sequences);
      r.batch = static_cast<int32_t>(pair % sequences);
    } else {
      const auto tiles = static_cast<uint32_t>(kPadded.count(problem) / kPadded.tile);
      const PaddedRows::TileStart start = kPadded.locate(problem, block % tiles);
      r.head = static_cast<int32_t>(block / tiles);
      r.batch = static_cast<int32_t>(start.batch);
      r.row0 = static_cast<int32_t>(start.row0);
    }
    return r;
  }
};

// Loads 16 bytes of a row from `column` on; columns past the last are 0.
template <class C>
TILEWISE_DEVICE void load_chunk(uint32_t (&r)[4], const typename C::Element::Storage* row,
                                int column, int columns, bool aligned) {
  using Element = typename C::Element;
  constexpr int kPerChunk = 16 / Element::kBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = 0;
  if (!C::kGeneral || aligned) {
    if (column < columns) ptx::ld_global_v4_b32(r, row + column);
  } else {
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) {
      if (column + i >= columns) continue;
      if constexpr (Element::kBytes == 4)
        r[i] = ptx::bits_of(row[column + i]);
      else
        r[i / 2] |= static_cast<uint32_t>(row[column + i].bits) << i % 2 * 16;
    }
  }
}

// How lanes divide rows.
template <class C>
struct RowLanes {
  static constexpr int kPerChunk = 16 / C::Element::kBytes;
  static constexpr int kChunks = C::kHeadDim / kPerChunk;
  static constexpr int kLanes = min(32, kChunks & -kChunks);
  static constexpr int kColumns = kChunks / kLanes;
  static constexpr int kRowsPerPass = kPrepareThreads / kLanes;
  static constexpr int kPasses = BackwardPlan<C>::kQueries / kRowsPerPass;
  // Passes whose loads are in flight together.
  static constexpr int kInFlight = min(kPasses, 2);
  static_assert(kPasses % kInFlight == 0 && kInFlight <= kLanes);

  TILEWISE_DEVICE static float sum(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask != 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
    return x;
  }
};

// row_lse = -lse / ln 2, row_delta = -delta = dlse - sum(out dout).
template <class C>
TILEWISE_KERNEL(kPrepareThreads, 1)
void backward_prepare(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = BackwardPlan<C>;
  using Lanes = RowLanes<C>;
  using Storage = typename C::Element::Storage;
  const int thread = ptx::thread_index();
  const RowBlock<C> block = RowBlock<C>::of(p);
  if (p.dq_sum != nullptr) {
    const uint32_t zero[4] = {0, 0, 0, 0};
    float* sums = p.dq_sum + int64_t{block.tile} * Plan::kDqTile + thread * 4;
#pragma unroll
    for (int i = 0; i < Plan::kDqTile; i += kPrepareThreads * 4)
      ptx::st_global_v4_b32(sums + i, zero);
  }

  if (block.batch < 0) return;
  const Problem& problem = p.problem;
  const Sequence s = sequence_of(problem, block.batch);
  const auto rows = static_cast<int32_t>(s.band.rows);
  const int columns = static_cast<int>(problem.head_dim_v);
  const bool aligned = rows_are_aligned<typename C::Element>(problem.out, columns) &&
                       rows_are_aligned<typename C::Element>(p.gradients.dout, columns);
  const bool wide = C::kGeneral && widens_out<Storage>(problem);
  const int lane = thread % Lanes::kLanes;
  const int first = block.row0 + thread / Lanes::kLanes;
  const Storage* out = static_cast<const Storage*>(problem.out.data) +
                       block.head * problem.out.stride_head + s.row_offset(problem.out, first);
  const Storage* d_out = static_cast<const Storage*>(p.gradients.dout.data) +
                         block.head * p.gradients.dout.stride_head +
                         s.row_offset(p.gradients.dout, first);

#pragma unroll 1
  for (int pass = 0; pass < Lanes::kPasses; pass += Lanes::kInFlight) {
    // kLanes lanes share a row; lane i of them finishes the row of pass `pass + i`.
    const int row = first + (pass + lane) * Lanes::kRowsPerPass;
    LogSum sum;
    float dlse = 0.0f;
    if (lane < Lanes::kInFlight && row < rows) {
      sum = common::log_sum_at(problem, s.lse_offset(problem.lse_stride_batch, row) +
                                            block.head * problem.lse_stride_head);
      if (p.gradients.dlse != nullptr)
        dlse = p.gradients.dlse[s.lse_offset(p.gradients.dlse_stride_batch, row) +
                                block.head * p.gradients.dlse_stride_head];
    }
    uint32_t x[Lanes::kInFlight][Lanes::kColumns][4];
    uint32_t y[Lanes::kInFlight][Lanes::kColumns][4];
#pragma unroll
    for (int r = 0; r < Lanes::kInFlight; ++r) {
      const bool in_use = first + (pass + r) * Lanes::kRowsPerPass < rows;
#pragma unroll
      for (int i = 0; i < Lanes::kColumns; ++i) {
        const int column = (i * Lanes::kLanes + lane) * Lanes::kPerChunk;
        load_chunk<C>(x[r][i], out, column, in_use && !wide ? columns : 0, aligned);
        load_chunk<C>(y[r][i], d_out, column, in_use ? columns : 0, aligned);
      }
      out += Lanes::kRowsPerPass * problem.out.stride_row;
      d_out += Lanes::kRowsPerPass * p.gradients.dout.stride_row;
    }
    float delta = 0.0f;
#pragma unroll
    for (int r = 0; r < Lanes::kInFlight; ++r) {
      float product = 0.0f;
      const int row_of_out = first + (pass + r) * Lanes::kRowsPerPass;
      const float* const wide_out = static_cast<const float*>(problem.out.data) +
                                    block.head * problem.out.stride_head +
                                    s.row_offset(problem.out, row_of_out);
#pragma unroll
      for (int i = 0; i < Lanes::kColumns; ++i) {
        if (wide) {
          product = common::add_wide_products<typename C::Element>(
              product, wide_out, (i * Lanes::kLanes + lane) * Lanes::kPerChunk,
              row_of_out < rows ? columns : 0, y[r][i]);
          continue;
        }
        product = common::add_products<typename C::Element>(product, x[r][i], y[r][i]);
      }
      product = Lanes::sum(product);
      if (lane == r) delta = product;
    }
    if (lane >= Lanes::kInFlight) continue;
    const int64_t at = int64_t{block.tile} * Plan::kQueries + (row - block.row0);
    const bool far = common::store_row_origin<typename C::Element>(p, at, sum);
    const bool none = sum.lse == kMinusInfinity;
    p.row_lse[at] = none ? common::kUnusedRow : far ? 0.0f : -sum.lse * kLog2e;
    p.row_delta[at] = none ? 0.0f : dlse - delta;
  }
}

}  // namespace tilewise::cuda::mma_sync
