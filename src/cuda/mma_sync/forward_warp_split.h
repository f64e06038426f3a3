// Intra-CTA split-K: two warps of a CTA split the keys of its tile. Each warp computes all rows
// over every second key tile, and has its own shared memory for queries, saved QueryTile and
// pipeline. At the end the first warp combines the sums of both. With one CTA per SM, one warp
// reads 37 GB/s and two read 60 GB/s.
#pragma once

#include "cuda/mma_sync/forward_softmax.h"

namespace tilewise::cuda::mma_sync {

template <class C>
TILEWISE_DEVICE int32_t warp_split_index() {
  return C::kWarpSplits > 1 ? ptx::uniform(ptx::warp_index()) : 0;
}

// The first warp adds the sums of the second one to its own. Lane i of both warps holds the same
// rows and columns, so each lane of the second warp passes its sums, through that warp's stages, to
// the same lane of the first. `bytes` is the distance between the shared memory of the two warps.
template <class C>
TILEWISE_DEVICE void combine_warp_splits(Outputs<C>& o, RowSoftmax<C>& softmax, int32_t warp_split,
                                         ptx::SharedAddress buffer, int bytes) {
  static_assert(C::kWarpSplits == 2);
  constexpr int kVectors = C::kHeadDim / 8;
  const ptx::SharedAddress slot = buffer + static_cast<uint32_t>(ptx::lane_index() * 16);
  const auto vector_at = [](int i) { return static_cast<uint32_t>(i * ptx::kWarpSize * 16); };
  if (warp_split > 0) {
    const uint32_t rows[4] = {ptx::bits_of(softmax.m[0][0]), ptx::bits_of(softmax.m[0][1]),
                              ptx::bits_of(softmax.l[0][0]), ptx::bits_of(softmax.l[0][1])};
    ptx::st_shared_v4_b32(slot + vector_at(kVectors), rows);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::bits_of(o.x[0][n][e]);
      ptx::st_shared_v4_b32(slot + vector_at(n), x);
    }
  }
  ptx::sync_block();
  if (warp_split > 0) return;
  const ptx::SharedAddress other = slot + static_cast<uint32_t>(bytes);
  uint32_t rows[4];
  ptx::ld_shared_v4_b32(rows, other + vector_at(kVectors));
  float shrink[2];
  float weight[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float m = ptx::float_of(rows[h]);
    const float highest = ptx::fmax(softmax.m[0][h], m);
    shrink[h] = ptx::ex2(softmax.m[0][h] - highest);
    weight[h] = ptx::ex2(m - highest);
    softmax.m[0][h] = highest;
    softmax.l[0][h] = softmax.l[0][h] * shrink[h] + ptx::float_of(rows[2 + h]) * weight[h];
  }
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    uint32_t x[4];
    ptx::ld_shared_v4_b32(x, other + vector_at(n));
#pragma unroll
    for (int e = 0; e < 4; ++e)
      o.x[0][n][e] = o.x[0][n][e] * shrink[e / 2] + ptx::float_of(x[e]) * weight[e / 2];
  }
}

}  // namespace tilewise::cuda::mma_sync
