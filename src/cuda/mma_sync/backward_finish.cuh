// Runs after the main kernel of the backward and computes dQ = scale * sums, a partial sum of
// dscale, and whether the sums are finite.
//
// One CTA per tile of query rows and query head. Its warps load the sums of a tile in the order of
// dq_index, kInFlight subtiles at a time, and store rows of dQ; nothing passes between warps except
// dscale and the flag, which are reduced in shared memory at the end.
#pragma once

#include "cuda/common/finish_tile.h"
#include "cuda/mma_sync/backward_prepare.cuh"
#include "cuda/mma_sync/row_alignment.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::mma_sync {

// How the warps divide a tile of sums: a warp takes the sums of kMainWarps warps of the main
// kernel, 16 rows x 16 columns at a time.
template <class C>
struct FinishPlan {
  using Plan = BackwardPlan<C>;
  static constexpr int kWarps = kFinishThreads / 32;
  static constexpr int kMainWarps = Plan::kWarps / kWarps;
  static constexpr int kSubtilesPerRow = Plan::kDqColumns / 16;
  static constexpr int kSubtilesPerWarp = Plan::kDqRows / 16 * kSubtilesPerRow;
  static constexpr int kSubtiles = kMainWarps * kSubtilesPerWarp;
  // Subtiles whose loads are in flight together.
  static constexpr int kInFlight = kSubtiles % 2 == 0 ? 2 : kSubtiles % 3 == 0 ? 3 : 1;
  static_assert(Plan::kWarps % kWarps == 0 && kSubtiles % kInFlight == 0);
};

// 16 rows x 16 columns of the sums of a warp: two neighbouring blocks of dq_index.
template <class C>
class DqSubtile {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  using Storage = typename Element::Storage;

 public:
  // Loads subtile `index` of `main_warp`, a warp of the main kernel.
  TILEWISE_DEVICE void load(const float* tile, int main_warp, int index, int lane) {
    const int m = index / FinishPlan<C>::kSubtilesPerRow;
    const int n = index % FinishPlan<C>::kSubtilesPerRow * 2;
    const float* sums =
        tile + main_warp * (Plan::kDqRows * Plan::kDqColumns) + dq_index<C>(m, n, 0, lane);
    row_ = dq_row<C>(main_warp, m, 0, lane);
    column_ = dq_column<C>(main_warp, n, 0, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (C::Arch::kVectorReduction) {
        uint32_t bits[4];
        ptx::ld_global_v4_b32(bits, sums + dq_index<C>(0, i, 0, 0));
#pragma unroll
        for (int e = 0; e < 4; ++e) x_[i][e] = ptx::float_of(bits[e]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) x_[i][e] = sums[dq_index<C>(0, i, e, 0)];
      }
    }
  }

  // Returns NaN when one of the sums is not finite, else `zero`. This includes unused rows and
  // columns past the last one: a needless flag only costs time.
  TILEWISE_DEVICE float nan_if_nonfinite(float zero) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = ptx::fma(x_[i][e], 0.0f, zero);
    }
    return zero;
  }

  // Returns sum + the dot product of the subtile with q, over the tile's first `rows` rows and
  // `columns` columns.
  TILEWISE_DEVICE float add_dot_q(float sum, const Storage* q, int64_t stride, int32_t rows,
                                  int columns) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row_ + e / 2 * 8;
        const int column = column_ + i * 8 + e % 2;
        if (row < rows && column < columns)
          sum = ptx::fma(to_float(q[row * stride + column]), x_[i][e], sum);
      }
    }
    return sum;
  }

  TILEWISE_DEVICE void store(Storage* dq, int64_t stride, int32_t rows, int columns, float scale,
                             bool aligned, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + half * 8;
      Storage* to = dq + row * stride;
      if (C::kGeneral && !aligned) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = column_ + i / 2 * 8 + i % 2;
          if (row < rows && column < columns)
            to[column] = from_float<Storage>(x_[i / 2][half * 2 + i % 2] * scale);
        }
      } else if constexpr (Element::kBytes == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t bits[2] = {ptx::bits_of(x_[i][half * 2] * scale),
                                    ptx::bits_of(x_[i][half * 2 + 1] * scale)};
          const int column = column_ + i * 8;
          if (row < rows && column < columns) ptx::st_global_v2_b32(to + column, bits);
        }
      } else {
        // Even lanes take four columns of the first block, odd lanes four of the second: a store
        // then fills 32 bytes of each row.
        const uint32_t first =
            tile::pack<Element>(x_[0][half * 2] * scale, x_[0][half * 2 + 1] * scale);
        const uint32_t second =
            tile::pack<Element>(x_[1][half * 2] * scale, x_[1][half * 2 + 1] * scale);
        const bool odd = lane % 2 != 0;
        const uint32_t other = ptx::shuffle_xor(odd ? first : second, 1);
        const uint32_t bits[2] = {odd ? other : first, odd ? second : other};
        const int column = column_ + (odd ? 6 : 0);
        if (row < rows && column < columns) ptx::st_global_v2_b32(to + column, bits);
      }
    }
  }

 private:
  float x_[2][4];
  int32_t row_;  // of x_[0][0] in the tile
  int32_t column_;
};

// Writes dQ = scale * sums for the valid rows; computes the tile's partial sum of dscale = sum(q dQ
// / scale), and whether the sums are finite.
template <class C>
TILEWISE_KERNEL(kFinishThreads, 1)
void backward_finish(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = BackwardPlan<C>;
  using Finish = FinishPlan<C>;
  using Storage = typename C::Element::Storage;
  const int lane = ptx::lane_index();
  const float* tile = p.dq_sum + ptx::block_index() * Plan::kDqTile;
  DqSubtile<C> subtiles[Finish::kInFlight];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < Finish::kInFlight; ++i) {
      const int subtile = ptx::warp_index() * Finish::kSubtiles + first + i;
      subtiles[i].load(tile, subtile / Finish::kSubtilesPerWarp, subtile % Finish::kSubtilesPerWarp,
                       lane);
    }
  };
  load(0);  // before the tile is known; the sums of an unused tile are arbitrary

  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  const bool needs_reduction = p.dscale_partials != nullptr || p.row_flags.data != nullptr;
  const RowBlock<C> block = RowBlock<C>::of(p);
  if (block.batch < 0) {
    if (needs_reduction) common::finish_tile<kFinishThreads>(p, block.tile, 0.0f, 0.0f, shared);
    return;
  }
  const Problem& problem = p.problem;
  const Sequence s = sequence_of(problem, block.batch);
  const auto rows = static_cast<int32_t>(min<int64_t>(s.band.rows - block.row0, Plan::kQueries));
  const auto columns = static_cast<int>(problem.head_dim);
  const float scale = score_of(problem).scale;
  const tilewise_tensor& view = p.gradients.dq;
  const bool aligned = !C::kGeneral || rows_are_aligned<typename C::Element>(view, columns);
  const Storage* q = static_cast<const Storage*>(problem.q.data) +
                     block.head * problem.q.stride_head + s.row_offset(problem.q, block.row0);
  auto* dq = static_cast<Storage*>(view.data);
  if (dq != nullptr) dq += block.head * view.stride_head + s.row_offset(view, block.row0);

  float dscale = 0.0f;
  float zero = 0.0f;
#pragma unroll 1
  for (int first = 0;;) {
    if (needs_reduction) {
#pragma unroll
      for (int i = 0; i < Finish::kInFlight; ++i) {
        zero = subtiles[i].nan_if_nonfinite(zero);
        if (p.dscale_partials != nullptr)
          dscale = subtiles[i].add_dot_q(dscale, q, problem.q.stride_row, rows, columns);
      }
    }
    if (dq != nullptr) {
#pragma unroll
      for (int i = 0; i < Finish::kInFlight; ++i)
        subtiles[i].store(dq, view.stride_row, rows, columns, scale, aligned, lane);
    }
    first += Finish::kInFlight;
    if (first == Finish::kSubtiles) break;
    load(first);
  }
  if (needs_reduction) common::finish_tile<kFinishThreads>(p, block.tile, dscale, zero, shared);
}

}  // namespace tilewise::cuda::mma_sync
