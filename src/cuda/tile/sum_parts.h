// Parts of sums that warps exchange through shared memory: warps that divide the columns which a
// product sums over.
#pragma once

#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tile {

// The address at which this lane has its values of part `part`. A part takes kPartBytes.
template <class Sums>
inline constexpr int kPartBytes = Sums::kCount * 4 * ptx::kWarpSize;
template <class Sums>
TILEWISE_DEVICE ptx::SharedAddress lane_part(ptx::SharedAddress parts, int part) {
  return parts + static_cast<uint32_t>(part * kPartBytes<Sums> + ptx::lane_index() * 16);
}

// The byte offset of the lane's four values (m, n).
template <int kColumns>
TILEWISE_DEVICE uint32_t part_vector(int m, int n) {
  return static_cast<uint32_t>((m * kColumns + n) * ptx::kWarpSize * 16);
}

template <int kRows, int kColumns>
TILEWISE_DEVICE void store_part(const Sums<kRows, kColumns>& s, ptx::SharedAddress part) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::bits_of(s.x[m][n][e]);
      ptx::st_shared_v4_b32(part + part_vector<kColumns>(m, n), x);
    }
  }
}

template <int kRows, int kColumns>
TILEWISE_DEVICE void add_part(Sums<kRows, kColumns>& s, ptx::SharedAddress part) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, part + part_vector<kColumns>(m, n));
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[m][n][e] += ptx::float_of(x[e]);
    }
  }
}

// Adds the sum of two parts. With a + b in another warp, all four warps get (a + b) + (c + d).
template <int kRows, int kColumns>
TILEWISE_DEVICE void add_sum_of_parts(Sums<kRows, kColumns>& s, ptx::SharedAddress c,
                                      ptx::SharedAddress d) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint32_t x[4];
      uint32_t y[4];
      ptx::ld_shared_v4_b32(x, c + part_vector<kColumns>(m, n));
      ptx::ld_shared_v4_b32(y, d + part_vector<kColumns>(m, n));
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[m][n][e] += ptx::float_of(x[e]) + ptx::float_of(y[e]);
    }
  }
}

}  // namespace tilewise::cuda::tile
