// The end of a tile of queries: the rows of out leave a warpgroup 16 bytes a lane.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/forward_work.h"

namespace tilewise::cuda::wgmma {

template <class C>
using Outputs = tile::Sums<1, C::kHeadDimV / 8>;
template <class C>
using OutTile = tile::SwizzledTile<64, C::kHeadDimV>;

template <class C>
TILEWISE_DEVICE char* out_row(const Problem& p, const ForwardWork<C>& work, int32_t r) {
  constexpr int kBytes = C::Element::kBytes;
  if (!work.rows.packed()) return work.out + r * (p.out.stride_row * kBytes);
  return static_cast<char*>(p.out.data) + work.offset(p.out, r) * kBytes;
}

// By way of shared memory, where there is room for it: whole lines leave together, and a third of
// the instructions are saved. Each warp stores what it has staged.
template <class C>
TILEWISE_DEVICE void store_staged(const Problem& p, const ForwardWork<C>& work,
                                  const LanePlace& place, OutTile<C> tile, const Outputs<C>& o,
                                  const RowResults<1>& result) {
  using Element = typename C::Element;
  using Tile = OutTile<C>;
  const int lane = ptx::lane_index();
  const int row0 = place.row0 % 64 - lane / 4;  // of the warp
  const float low = result.factor[0][0];
  const float high = result.factor[0][1];
  const int mine = row0 + lane % 16;
#pragma unroll
  for (int n = 0; n < C::kHeadDimV / 8; n += 2) {
    const float* a = o.x[0][n];
    const float* b = o.x[0][n + 1];
    const uint32_t words[4] = {
        tile::pack<Element>(a[0] * low, a[1] * low), tile::pack<Element>(a[2] * high, a[3] * high),
        tile::pack<Element>(b[0] * low, b[1] * low), tile::pack<Element>(b[2] * high, b[3] * high)};
    ptx::stmatrix_x4(tile.base + static_cast<uint32_t>(Tile::chunk_offset(mine, n + lane / 16)),
                     words);
  }
  ptx::sync_warp();
  const auto chunks = static_cast<int>(p.head_dim_v) / 8;
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int row = row0 + 4 * pass + lane / 8;
    const int32_t r = place.row0 / 64 * 64 + row;
    if (r >= work.rows.count) continue;
    char* const to = out_row(p, work, r) + lane % 8 * 16;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const int chunk = panel * 8 + lane % 8;
      uint32_t x[4];
      if (chunk >= chunks) continue;
      ptx::ld_shared_v4_b32(x, tile.base + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)));
      ptx::st_global_v4_b32(to + panel * 128, x);
    }
  }
  ptx::sync_warp();  // the next tile may be staged
}

// Straight from registers: the four lanes of a row exchange words until each has 16 bytes that
// follow each other.
template <class C>
TILEWISE_DEVICE void store_direct(const Problem& p, const ForwardWork<C>& work,
                                  const LanePlace& place, const Outputs<C>& o,
                                  const RowResults<1>& result) {
  using Element = typename C::Element;
  const int lane = place.column / 2;  // of the quad
  const auto columns = static_cast<int>(p.head_dim_v);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = place.row(0, h);
    const bool exists = r < work.rows.count;
    const float factor = result.factor[0][h];
    char* const to = out_row(p, work, exists ? r : 0) + lane * 16;
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &o.x[0][n + i][2 * h];
        word[i] = tile::pack<Element>(x[0] * factor, x[1] * factor);
      }
      tile::quad_transpose(word, lane);
      if (exists && 8 * (n + lane) < columns) ptx::st_global_v4_b32(to + n * 16, word);
    }
  }
}

}  // namespace tilewise::cuda::wgmma
