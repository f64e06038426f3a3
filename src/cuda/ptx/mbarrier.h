// Barriers in shared memory that also count bytes (sm_90), and the fences between the two ways to
// reach shared memory. PTX ISA 9.7.13: mbarrier, 9.7.13.4: fence.
//
// A phase of a barrier ends when its arrivals and its bytes are complete; waits name the parity of
// the phase: 0 for the first one, then 1, 0, ... Waiting for parity 1 of a new barrier returns at
// once.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

TILEWISE_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  emulator::mbarrier_init(barrier, arrivals);
}
TILEWISE_DEVICE void mbarrier_arrive(SharedAddress barrier) { emulator::mbarrier_arrive(barrier); }
// One arrival that also announces bytes which asynchronous copies will deliver.
TILEWISE_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
  emulator::mbarrier_arrive_expect_tx(barrier, bytes);
}
TILEWISE_DEVICE void mbarrier_wait_parity(SharedAddress barrier, int parity) {
  emulator::mbarrier_wait_parity(barrier, parity);
}
// Makes initialised barriers visible to asynchronous copies.
TILEWISE_DEVICE void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
// This thread's loads and stores of shared memory come before the asynchronous accesses (wgmma,
// TMA) of whoever synchronises with it afterwards.
TILEWISE_DEVICE void fence_proxy_async() { emulator::fence_proxy_async(); }
// The same for all memory.
TILEWISE_DEVICE void fence_proxy_async_all() { emulator::fence_proxy_async(); }
// The same for global memory alone, of accesses that are ordered before this one: no wait for them.
TILEWISE_DEVICE void fence_proxy_async_global() { emulator::fence_proxy_async(); }

#else

TILEWISE_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Without a scope: `.release.cluster` compiles to a fence of the whole GPU (measured 500
// instead of 628 TFLOP/s).
TILEWISE_DEVICE void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
TILEWISE_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
TILEWISE_DEVICE void mbarrier_wait_parity(SharedAddress barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\nbra.uni again;\nend:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
TILEWISE_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
TILEWISE_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
TILEWISE_DEVICE void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
TILEWISE_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif

}  // namespace tilewise::cuda::ptx
