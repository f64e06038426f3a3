// Barriers in shared memory that also count bytes (sm_90), and the fences between the generic and
// the async proxy. PTX ISA 9.7.13: mbarrier, 9.7.13.4: fence.
//
// A phase of a barrier ends when its arrivals and its bytes are complete. A wait names the parity
// of the phase: 0 for the first one, then 1, 0, ... Waiting for parity 1 of a new barrier returns
// at once.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// mbarrier.init: a phase takes `arrivals` arrivals.
TILEWISE_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  emulator::mbarrier_init(barrier, arrivals);
}
// mbarrier.arrive
TILEWISE_DEVICE void mbarrier_arrive(SharedAddress barrier) { emulator::mbarrier_arrive(barrier); }
// mbarrier.arrive.expect_tx: one arrival; the phase also waits for `bytes` of asynchronous copies.
TILEWISE_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, int bytes) {
  emulator::mbarrier_arrive_expect_tx(barrier, bytes);
}
// mbarrier.try_wait.parity, until the phase of this parity has ended.
TILEWISE_DEVICE void mbarrier_wait_parity(SharedAddress barrier, int parity) {
  emulator::mbarrier_wait_parity(barrier, parity);
}
// The same, but a wait of more than `nanoseconds` executes `trap`: the launch fails, and the next
// call of the CUDA runtime returns an error. The emulator reports a wait that cannot end.
TILEWISE_DEVICE void mbarrier_wait_parity_or_trap(SharedAddress barrier, int parity, uint64_t) {
  emulator::mbarrier_wait_parity(barrier, parity);
}
// fence.mbarrier_init: makes initialised barriers visible to asynchronous copies.
TILEWISE_DEVICE void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
// fence.proxy.async.shared::cta: orders this thread's loads and stores of shared memory before the
// asynchronous accesses (wgmma, TMA) of threads that synchronise with it afterwards.
TILEWISE_DEVICE void fence_proxy_async() { emulator::fence_proxy_async(); }
// fence.proxy.async: the same for all memory.
TILEWISE_DEVICE void fence_proxy_async_all() { emulator::fence_proxy_async(); }
// fence.proxy.async.global: the same for global memory alone. Accesses that are already ordered
// before this one are not waited for.
TILEWISE_DEVICE void fence_proxy_async_global() { emulator::fence_proxy_async(); }

#else

TILEWISE_DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Without a scope, because `.release.cluster` compiles to a fence of the whole GPU (500 instead of
// 628 TFLOP/s).
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
// The clock is read only if the first try fails.
TILEWISE_DEVICE void mbarrier_wait_parity_or_trap(SharedAddress barrier, int parity,
                                                  uint64_t nanoseconds) {
  asm volatile(
      "{\n.reg .pred done, late;\n.reg .u64 begin, waited;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\nmov.u64 begin, %globaltimer;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\nmov.u64 waited, %globaltimer;\nsub.u64 waited, waited, begin;\n"
      "setp.gt.u64 late, waited, %2;\n@late trap;\nbra.uni again;\nend:\n}" ::"r"(barrier),
      "r"(parity), "l"(nanoseconds)
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
