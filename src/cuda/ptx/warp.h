// Exchanges between the lanes of a warp, and hints to the compiler. PTX ISA 9.7.9:
// shfl.sync, 9.7.13: vote.sync and redux.sync, 9.7.14: movmatrix.
#pragma once

#include <bit>

#include "cuda/ptx/block.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// shfl.sync.bfly: the x of lane `lane_index() ^ mask`.
TILEWISE_DEVICE float shuffle_xor(float x, int mask) { return emulator::shuffle_xor(x, mask); }
TILEWISE_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) {
  return emulator::shuffle_xor(x, mask);
}
// shfl.sync.idx: the x of lane `lane`.
TILEWISE_DEVICE float shuffle(float x, int lane) { return emulator::shuffle(x, lane); }
TILEWISE_DEVICE uint32_t shuffle(uint32_t x, int lane) { return emulator::shuffle(x, lane); }
// shfl.sync.idx within groups of kLanes lanes, a power of 2: the x of lane `lane` of the group.
template <int kLanes>
TILEWISE_DEVICE uint32_t shuffle_within(uint32_t x, int lane) {
  return emulator::shuffle(x, emulator::thread_index() % kWarpSize / kLanes * kLanes + lane);
}
// vote.sync.any: whether x is true in any lane.
TILEWISE_DEVICE bool any(bool x) { return emulator::any(x); }
// redux.sync.add (sm_80): the sum over all lanes.
TILEWISE_DEVICE uint32_t sum(uint32_t x) {
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) x += emulator::shuffle_xor(x, lanes);
  return x;
}
// vote.sync.ballot: bit i is the x of lane i.
TILEWISE_DEVICE uint32_t ballot(bool x) { return sum(x ? 1u << lane_index() : 0u); }
// popc.b32
TILEWISE_DEVICE int count_ones(uint32_t x) { return std::popcount(x); }
// 32 - clz.b32: 1 + the index of the highest bit that is 1, or 0.
TILEWISE_DEVICE int bit_width(uint32_t x) { return static_cast<int>(std::bit_width(x)); }
// redux.sync.max (sm_80): the maximum over all lanes.
TILEWISE_DEVICE uint32_t highest(uint32_t x) {
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const uint32_t other = emulator::shuffle_xor(x, lanes);
    x = x < other ? other : x;
  }
  return x;
}
// elect.sync (sm_90): true in one lane of a whole warp. From `lane == 0` ptxas does not conclude
// that it is one lane, and wraps bulk copies in a loop over the lanes.
TILEWISE_DEVICE bool elect_one() { return emulator::thread_index() % kWarpSize == 0; }
// movmatrix.trans (sm_75): transposes an 8x8 matrix of 16-bit elements, of which lane l holds pair
// l % 4 of row l / 4.
TILEWISE_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  const int lane = emulator::thread_index() % kWarpSize;
  const int from = lane % 4 * 8 + lane / 8;
  const int shift = lane / 4 % 2 * 16;
  const uint32_t low = emulator::shuffle(x, from) >> shift & 0xffffu;
  return low | (emulator::shuffle(x, from + 4) >> shift & 0xffffu) << 16;
}
// Put into a branch, it keeps the compiler from replacing the branch by selects.
TILEWISE_DEVICE void force_branch() {}
// ptxas moves no instruction across it: a branch on `never`, which is false at run time but unknown
// to the compiler. Without it ptxas moves a wait for products ahead of everything that does not
// read their sums, even ahead of a whole softmax.
TILEWISE_DEVICE void scheduling_fence(bool) {}
// No instruction: returns x, but the compiler no longer knows its origin. So it computes values
// that depend on the result after this point, instead of earlier and keeping them in registers.
TILEWISE_DEVICE uint32_t opaque(uint32_t x) { return x; }
TILEWISE_DEVICE uint64_t opaque_u64(uint64_t x) { return x; }
TILEWISE_DEVICE const char* opaque(const char* x) { return x; }

#else

inline constexpr unsigned kAllLanes = 0xffffffffu;
TILEWISE_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(kAllLanes, x, mask); }
TILEWISE_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}
TILEWISE_DEVICE float shuffle(float x, int lane) { return __shfl_sync(kAllLanes, x, lane); }
TILEWISE_DEVICE uint32_t shuffle(uint32_t x, int lane) { return __shfl_sync(kAllLanes, x, lane); }
template <int kLanes>
TILEWISE_DEVICE uint32_t shuffle_within(uint32_t x, int lane) {
  return __shfl_sync(kAllLanes, x, lane, kLanes);
}
TILEWISE_DEVICE bool any(bool x) { return __any_sync(kAllLanes, x) != 0; }
TILEWISE_DEVICE uint32_t ballot(bool x) { return __ballot_sync(kAllLanes, x); }
TILEWISE_DEVICE int count_ones(uint32_t x) { return __popc(static_cast<int>(x)); }
TILEWISE_DEVICE int bit_width(uint32_t x) { return 32 - __clz(static_cast<int>(x)); }
TILEWISE_DEVICE uint32_t sum(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, x);
#else
#pragma unroll
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
#endif
}
TILEWISE_DEVICE uint32_t highest(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, x, lanes);
    x = x < other ? other : x;
  }
  return x;
#endif
}
TILEWISE_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}
TILEWISE_DEVICE uint32_t movmatrix_trans(uint32_t x) {  // sm_75
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
TILEWISE_DEVICE void force_branch() { asm volatile(""); }
TILEWISE_DEVICE void scheduling_fence(bool never) {
  if (never) asm volatile("nanosleep.u32 0;");
}
TILEWISE_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
TILEWISE_DEVICE uint64_t opaque_u64(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
TILEWISE_DEVICE const char* opaque(const char* x) {
  asm volatile("" : "+l"(x));
  return x;
}

#endif

TILEWISE_DEVICE int64_t shuffle(int64_t x, int lane) {
  const uint32_t low = shuffle(static_cast<uint32_t>(x), lane);
  const uint64_t high = shuffle(static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32), lane);
  return static_cast<int64_t>(high << 32 | low);
}

// Tells the compiler that x is the same in all lanes: it then keeps x, and what it computes from
// x, in uniform registers, once per warp.
TILEWISE_DEVICE int32_t uniform(int32_t x) {
  return static_cast<int32_t>(shuffle(static_cast<uint32_t>(x), 0));
}

// Inclusive prefix sum over the lanes.
TILEWISE_DEVICE uint32_t sum_to_lane(uint32_t x) {
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const uint32_t other = shuffle(x, lane_index() < lanes ? 0 : lane_index() - lanes);
    if (lane_index() >= lanes) x += other;
  }
  return x;
}

}  // namespace tilewise::cuda::ptx
