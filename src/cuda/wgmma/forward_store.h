// The end of a tile of queries: a warpgroup stores its rows of out and lse straight from registers.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/ptx/global.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

// The four lanes of a row exchange words until each has 16 bytes that follow each other: no detour
// by shared memory, which the next tile needs.
template <class Element, int kColumns>
TILEWISE_DEVICE void store_outputs(const Problem& p, const BlockWork& work, const LanePlace& place,
                                   const tile::Sums<1, kColumns>& o, const RowResults<1>& result) {
  static_assert(kColumns % 4 == 0);
  const int lane = place.column / 2;  // of the quad
  const auto columns = static_cast<int>(p.head_dim_v);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = place.row(0, h);
    const bool exists = r < work.rows.count;
    const float factor = result.factor[0][h];
    char* row = static_cast<char*>(p.out.data);
    if (exists) row += (work.offset(p.out, r) + lane * 8) * Element::kBytes;
#pragma unroll
    for (int n = 0; n < kColumns; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &o.x[0][n + i][2 * h];
        word[i] = tile::pack<Element>(x[0] * factor, x[1] * factor);
      }
      tile::quad_transpose(word, lane);
      if (exists && 8 * (n + lane) < columns)
        ptx::st_global_v4_b32(row + 8 * n * Element::kBytes, word);
    }
  }
}

// What has been summed for the rows of a warpgroup becomes results.
template <class Element, int kColumns>
TILEWISE_DEVICE void store(const ForwardParams& p, const BlockWork& work, int32_t index,
                           const LanePlace& place, const tile::Sums<1, kColumns>& o,
                           const float (&m)[1][2], float (&l)[1][2], float weight) {
  const RowResults<1> result = finish_rows<Element>(p, work, place, m, l, weight);
  if (p.flags.data != nullptr && !outputs_are_finite(work, place, o, l)) [[unlikely]]
    p.flags.data[index] = 1;  // after the 0 of the loading warp
  if (work.splits > 1) [[unlikely]] {
    store_partial(p, work, place, o, result);
    return;
  }
  store_outputs<Element>(p.problem, work, place, o, result);
  store_lse(p.problem, work, place, result);
}

}  // namespace tilewise::cuda::wgmma
