// Named barriers between the warps of a CTA, and the register count of warpgroups (four warps, the
// first one a multiple of four). PTX ISA 9.7.13.1: barrier (bar), 9.7.20: setmaxnreg.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

inline constexpr int kWarpgroupSize = 128;

#if defined(TILEWISE_EMULATOR)

// bar.sync and bar.arrive on the named barriers 1 to 15 (0 is that of sync_block). `threads`
// threads take part; a thread that syncs waits for all of them, one that arrives does not wait.
TILEWISE_DEVICE void bar_sync(int barrier, int threads) { emulator::bar_sync(barrier, threads); }
TILEWISE_DEVICE void bar_arrive(int barrier, int threads) {
  emulator::bar_arrive(barrier, threads);
}
// bar.red.or: as bar_sync, and returns whether x is true in any of the threads.
TILEWISE_DEVICE bool bar_any(int barrier, int threads, bool x) {
  return emulator::bar_any(barrier, threads, x);
}
// setmaxnreg.inc and setmaxnreg.dec: registers per thread of the warps of a warpgroup.
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_inc() {
  emulator::setmaxnreg_inc(kRegisters);
}
template <int kRegisters>
TILEWISE_DEVICE void setmaxnreg_dec() {
  emulator::setmaxnreg_dec(kRegisters);
}
// No instruction: the compiler moves no use of the array across this point.
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
template <int kN>
TILEWISE_DEVICE void fence_register(float (&x)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#endif

}  // namespace tilewise::cuda::ptx
