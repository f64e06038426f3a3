// CTAs of a cluster, which run at the same time and access each other's shared memory (sm_90). PTX
// ISA 9.7.13.3: barrier.cluster, 9.7.9: mapa, cp.async.bulk, st.async, 9.7.13.15: mbarrier.arrive.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// barrier.cluster.arrive.release and wait.acquire: all threads of the cluster meet, and see each
// other's earlier writes.
TILEWISE_DEVICE void sync_cluster() { emulator::sync_cluster(); }
// barrier.cluster.arrive.relaxed and barrier.cluster.wait: the same in two halves. After `wait`,
// data read before `arrive` may be overwritten, and barriers that were initialised and fenced
// before it may be used. No other write is released, which would be a fence of the whole GPU. A CTA
// that has exited counts as arrived. (The emulator lets all threads meet in `wait`.)
TILEWISE_DEVICE void barrier_cluster_arrive_relaxed() {}
TILEWISE_DEVICE void barrier_cluster_wait() { emulator::sync_cluster(); }
// mapa: the address in CTA `rank` that corresponds to `local`, an address in this CTA.
TILEWISE_DEVICE SharedAddress map_to_rank(SharedAddress local, int rank) {
  return emulator::map_to_rank(local, rank);
}
// mbarrier.arrive.relaxed.cluster: arrives at a barrier of another CTA, for empty barriers. It
// guarantees only that this thread's loads into registers are complete.
TILEWISE_DEVICE void mbarrier_arrive_remote(SharedAddress barrier) {
  emulator::mbarrier_arrive_remote(barrier);
}
// cp.async.bulk, shared to shared of another CTA, in which `to` and `barrier` lie.
TILEWISE_DEVICE void cp_async_bulk_to_rank(SharedAddress to, SharedAddress from, int bytes,
                                           SharedAddress barrier) {
  emulator::cp_async_bulk_to_rank(to, from, bytes, barrier);
}
// st.async: stores 16 bytes to another CTA; its `barrier` counts them.
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
TILEWISE_DEVICE SharedAddress map_to_rank(SharedAddress local, int rank) {
  SharedAddress other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(local), "r"(rank));
  return other;
}
// Relaxed, because a release waits for reductions in flight (11 % of the samples of a backward).
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
