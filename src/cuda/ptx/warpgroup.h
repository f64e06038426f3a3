// What warps and warpgroups (four warps, the first one a multiple of four) of one block do with
// each other: named barriers, registers, dependent launches. PTX ISA 9.7.13.1: barrier
// (bar), 9.7.20: setmaxnreg, 9.7.13.13: griddepcontrol.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

inline constexpr int kWarpgroupSize = 128;

#if defined(TILEWISE_EMULATOR)

// Named barriers 1 to 15 (0 is that of sync_block): `threads` threads meet; who arrives goes on,
// who syncs waits.
TILEWISE_DEVICE void bar_sync(int barrier, int threads) { emulator::bar_sync(barrier, threads); }
TILEWISE_DEVICE void bar_arrive(int barrier, int threads) {
  emulator::bar_arrive(barrier, threads);
}
// As bar_sync. Whether x is true for one of those who meet.
TILEWISE_DEVICE bool bar_any(int barrier, int threads, bool x) {
  return emulator::bar_any(barrier, threads, x);
}
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_inc() {
  emulator::setmaxnreg_inc(kRegisters);
}
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_dec() {
  emulator::setmaxnreg_dec(kRegisters);
}
// A value that all lanes of the warp have: tells the compiler so.
TILEWISE_DEVICE int uniform(int x) {
  return static_cast<int>(emulator::shuffle(static_cast<uint32_t>(x), 0));
}
// No instruction: uses of `x` stay on their side of this point.
template <int kN>
TILEWISE_DEVICE void fence_register(float (&)[kN]) {}

#else

TILEWISE_DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
TILEWISE_DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
TILEWISE_DEVICE bool bar_any(int barrier, int threads, bool x) {
  uint32_t some;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(some)
      : "r"(barrier), "r"(threads), "r"(x ? 1u : 0u)
      : "memory");
  return some != 0;
}
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
TILEWISE_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
template <int kN>
TILEWISE_DEVICE void fence_register(float (&x)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#endif

}  // namespace tilewise::cuda::ptx
