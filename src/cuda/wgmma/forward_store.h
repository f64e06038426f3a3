// Stores of the forward: a warpgroup writes rows of out, 16 bytes per lane.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/common/out.h"
#include "cuda/ptx/global.h"
#include "cuda/wgmma/forward_tile.h"

namespace tilewise::cuda::wgmma {

template <class C>
using Outputs = tile::Sums<1, C::kHeadDimV / 8>;

// Addresses of the rows of a lane: the first row, and the step in bytes from one row of the tile to
// the next (packed heads have no constant step). `left` rows of the tile exist from the first on.
template <class C>
struct OutRows {
  char* first;
  int64_t step;
  int32_t left;

  TILEWISE_DEVICE static OutRows of(const Problem& p, const ForwardWorkTile<C>& work_tile,
                                    int32_t r) {
    const int64_t step = p.out.stride_row * C::Out::kBytes;
    return {work_tile.out + r * step, step, work_tile.rows.count - r};
  }
};

template <class C>
TILEWISE_DEVICE char* packed_row(const Problem& p, const ForwardWorkTile<C>& work_tile, int32_t r) {
  return static_cast<char*>(p.out.data) + work_tile.offset(p.out, r) * C::Out::kBytes;
}

// Stores straight from registers: the four lanes of a row exchange words until each has 16
// contiguous bytes. Staging through shared memory is 1 to 3 % slower up to 1k rows.
template <class C, class Out = typename C::Out>
TILEWISE_DEVICE void store_outputs(const Problem& p, const ForwardWorkTile<C>& work_tile,
                                   const LanePosition& position, const Outputs<C>& o,
                                   const RowResults<1>& result, const OutRows<C>& rows) {
  const int lane = position.lane_of_quad();
  const bool packed = C::kGeneral && work_tile.rows.packed();
  const auto chunks = static_cast<int>(p.head_dim_v) / 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = result.factor[0][h];
    char* to = rows.first + 8 * h * rows.step;
    if (packed) [[unlikely]]
      to = packed_row<C>(p, work_tile, min(position.row(0, h), work_tile.rows.count - 1));
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &o.x[0][n + i][2 * h];
        word[i] = tile::pack<Out>(x[0] * factor, x[1] * factor);
      }
      tile::quad_transpose(word, lane);
      if (8 * h < rows.left && n + lane < chunks) ptx::st_global_v4_b32(to + (n + lane) * 16, word);
    }
  }
}

template <class C>
TILEWISE_DEVICE void store_row_sums(const Problem& p, const ForwardWorkTile<C>& work_tile,
                                    const LanePosition& position, const RowResults<1>& result) {
  if (C::kGeneral && work_tile.rows.packed()) [[unlikely]]
    return store_lse(p, work_tile, position, result);
  const int32_t left = work_tile.rows.count - position.row0;
  if (p.lse == nullptr || position.column != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (8 * h < left)
      store_log_sum(p, work_tile.lse + position.row0 + 8 * h, {result.lse[0][h], result.low[0][h]});
  }
}

// Stores the fp32 partial results of a Stream-K share: all rows and columns of the tile, so that a
// lane needs one address.
template <class C>
TILEWISE_DEVICE void store_partial_tile(const ForwardParams& p, const ForwardWorkTile<C>& work_tile,
                                        const LanePosition& position, const Outputs<C>& o,
                                        const RowResults<1>& result) {
  constexpr int kRows = C::kForward.rows();
  const int64_t row = int64_t{work_tile.split} * kRows + position.row0;
  float* const out = p.partial_out + row * C::kHeadDimV + position.column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = result.factor[0][h];
    if (position.column == 0) p.partial_lse[row + 8 * h] = result.lse[0][h];
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; ++n) {
      const uint32_t pair[2] = {ptx::bits_of(o.x[0][n][2 * h] * factor),
                                ptx::bits_of(o.x[0][n][2 * h + 1] * factor)};
      ptx::st_global_v2_b32(out + 8 * h * C::kHeadDimV + 8 * n, pair);
    }
  }
}

}  // namespace tilewise::cuda::wgmma
