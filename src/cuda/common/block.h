// Reductions, scans and shared-memory words for the warps and CTAs of the kernels in this folder.
#pragma once

#include "base/half.h"
#include "base/math.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

// 32-bit words of shared memory.
struct SharedWords {
  ptx::SharedAddress base;

  TILEWISE_DEVICE uint32_t get(int i) const {
    return ptx::ld_shared_b32(base + static_cast<uint32_t>(i) * 4);
  }
  TILEWISE_DEVICE void set(int i, uint32_t x) const {
    ptx::st_shared_b32(base + static_cast<uint32_t>(i) * 4, x);
  }
};

TILEWISE_DEVICE SharedWords shared_words(int first_byte) {
  return {ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(first_byte)};
}

TILEWISE_DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int mask = ptx::kWarpSize / 2; mask != 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}

// The maximum, the same bits in all lanes. NaN loses against a number.
TILEWISE_DEVICE float max_of_warp(float x) {
#pragma unroll
  for (int mask = ptx::kWarpSize / 2; mask != 0; mask /= 2)
    x = ptx::fmax(x, ptx::shuffle_xor(x, mask));
  return x;
}

TILEWISE_DEVICE uint32_t min_of_warp(uint32_t x) {
#pragma unroll
  for (int mask = ptx::kWarpSize / 2; mask != 0; mask /= 2) x = min(x, ptx::shuffle_xor(x, mask));
  return x;
}

// Exclusive prefix sum; `total` is the sum of all lanes.
TILEWISE_DEVICE uint32_t scan_of_warp(uint32_t x, uint32_t* total) {
  uint32_t sum = x;
  const int lane = ptx::lane_index();
#pragma unroll
  for (int step = 1; step < ptx::kWarpSize; step *= 2) {
    const uint32_t before = ptx::shuffle(sum, lane < step ? lane : lane - step);
    if (lane >= step) sum += before;
  }
  *total = ptx::shuffle(sum, ptx::kWarpSize - 1);
  return sum - x;
}

// Exclusive prefix sum over the threads of the CTA. `scratch` has a word per warp and may be
// reused after the next barrier.
TILEWISE_DEVICE uint32_t scan_of_block(uint32_t x, SharedWords scratch, uint32_t* total) {
  uint32_t of_warp = 0;
  uint32_t before = scan_of_warp(x, &of_warp);
  if (ptx::lane_index() == 0) scratch.set(ptx::warp_index(), of_warp);
  ptx::sync_block();
  *total = 0;
  for (int warp = 0; warp < ptx::block_threads() / ptx::kWarpSize; ++warp) {
    const uint32_t sum = scratch.get(warp);
    if (warp < ptx::warp_index()) before += sum;
    *total += sum;
  }
  return before;
}

// e^x for weights and probabilities. Rounding x * log2(e) costs up to |x| units in the last place,
// which is harmless because the result is small where |x| is large.
TILEWISE_DEVICE float exponential(float x) { return ptx::exp2_accurate(x * 1.4426950408889634f); }

// from_float, as one instruction where every GPU has one.
template <class T>
TILEWISE_DEVICE T rounded(float x) {
  return from_float<T>(x);
}
template <>
TILEWISE_DEVICE Half rounded<Half>(float x) {
  return {static_cast<uint16_t>(ptx::cvt_f16x2(x, 0.0f))};
}

TILEWISE_DEVICE bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

// The dot product of two rows, computed by a warp.
template <class A, class B>
TILEWISE_DEVICE float dot_of_warp(const A* a, const B* b, int64_t columns) {
  float sum = 0.0f;
  for (int64_t i = ptx::lane_index(); i < columns; i += ptx::kWarpSize)
    sum = ptx::fma(to_float(a[i]), to_float(b[i]), sum);
  return sum_of_warp(sum);
}

}  // namespace tilewise::cuda::common
