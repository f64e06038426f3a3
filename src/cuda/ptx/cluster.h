// Blocks that run side by side and reach into each other's shared memory (sm_90). PTX ISA 9.7.13.3:
// barrier.cluster, 9.7.9: mapa, cp.async.bulk, st.async, 9.7.13.15: mbarrier.arrive.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// All threads of all blocks of the cluster; what they wrote before is seen by all after it.
TILEWISE_DEVICE void sync_cluster() { emulator::sync_cluster(); }
// The same in two halves: what was read before `arrive` may be overwritten after `wait`, and
// barriers that were initialised and fenced before may be used. No other write is released: that is
// a fence of the whole GPU. Blocks that have exited have arrived. (Emulated, all meet in `wait`.)
TILEWISE_DEVICE void barrier_cluster_arrive_relaxed() {}
TILEWISE_DEVICE void barrier_cluster_wait() { emulator::sync_cluster(); }
// Where `own`, an address of this block, lies in the other block.
TILEWISE_DEVICE SharedAddress map_to_rank(SharedAddress own, int rank) {
  return emulator::map_to_rank(own, rank);
}
// An arrival at a barrier of the other block. It orders nothing but that all reads of registers'
// contents have been made: for barriers that say that something has been read.
TILEWISE_DEVICE void mbarrier_arrive_remote(SharedAddress barrier) {
  emulator::mbarrier_arrive_remote(barrier);
}
// `to` and `barrier` lie in the other block.
TILEWISE_DEVICE void cp_async_bulk_to_rank(SharedAddress to, SharedAddress from, int bytes,
                                           SharedAddress barrier) {
  emulator::cp_async_bulk_to_rank(to, from, bytes, barrier);
}
// 16 bytes from registers, which the barrier counts.
TILEWISE_DEVICE void st_async_v4_b32(SharedAddress to, const uint32_t (&r)[4],
                                     SharedAddress barrier) {
  emulator::st_async_v4_b32(to, r, barrier);
}

#else

TILEWISE_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
TILEWISE_DEVICE void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
TILEWISE_DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
TILEWISE_DEVICE SharedAddress map_to_rank(SharedAddress own, int rank) {
  SharedAddress other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank));
  return other;
}
// Relaxed: a release waits for the reductions in flight (11 % of the samples of a backward).
TILEWISE_DEVICE void mbarrier_arrive_remote(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
TILEWISE_DEVICE void cp_async_bulk_to_rank(SharedAddress to, SharedAddress from, int bytes,
                                           SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
TILEWISE_DEVICE void st_async_v4_b32(SharedAddress to, const uint32_t (&r)[4],
                                     SharedAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(to),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(barrier)
      : "memory");
}

#endif

}  // namespace tilewise::cuda::ptx
