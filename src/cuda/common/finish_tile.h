// The end of the kernels that convert a tile of dq_sum to dQ (the finish kernels of the backwards).
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

// Shared memory that `finish_tile` needs in a CTA of `threads` threads.
constexpr int finish_tile_bytes(int threads) { return threads / ptx::kWarpSize * 8; }

// Writes the CTA's partial sum of dscale, and a flag if its sums of dQ are not finite: `zero` is
// NaN in a thread with such a sum, otherwise 0. All threads of the CTA call it.
template <int kThreads>
TILEWISE_DEVICE void finish_tile(const BackwardParams& p, int32_t tile, float dscale, float zero,
                                 ptx::SharedAddress shared) {
  const int thread = ptx::thread_index();
#pragma unroll
  for (int mask = 16; mask != 0; mask /= 2) dscale += ptx::shuffle_xor(dscale, mask);
  const bool not_finite = ptx::any(zero != 0.0f);
  if (thread % ptx::kWarpSize == 0) {
    const ptx::SharedAddress of_warp = shared + static_cast<uint32_t>(thread / ptx::kWarpSize * 8);
    ptx::st_shared_b32(of_warp, ptx::bits_of(dscale));
    ptx::st_shared_b32(of_warp + 4, not_finite ? 1 : 0);
  }
  ptx::sync_block();
  if (thread != 0) return;
  float sum = 0.0f;
  uint32_t flag = 0;
  for (int i = 0; i < kThreads / ptx::kWarpSize; ++i) {
    uint32_t x[2];
    ptx::ld_shared_v2_b32(x, shared + static_cast<uint32_t>(i * 8));
    sum += ptx::float_of(x[0]);
    flag |= x[1];
  }
  if (p.dscale_partials != nullptr) p.dscale_partials[tile] = sum;
  if (p.row_flags.data != nullptr) p.row_flags.data[tile] = static_cast<uint8_t>(flag);
}

}  // namespace tilewise::cuda::common
