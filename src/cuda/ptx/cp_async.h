// Asynchronous copies from global to shared memory (sm_80). PTX ISA 9.7.9: cp.async. Bytes that are
// not read from `source` are written as 0.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// cp.async.cg: 16 bytes, which bypass L1.
TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source) {
  emulator::cp_async(to, source, 16, 16);
}
TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source, int bytes_read) {
  emulator::cp_async(to, source, 16, bytes_read);
}
// cp.async.ca: 4 bytes.
TILEWISE_DEVICE void cp_async_4(SharedAddress to, const void* source, int bytes_read) {
  emulator::cp_async(to, source, 4, bytes_read);
}
// cp.async.mbarrier.arrive.noinc (PTX ISA 9.7.13.15): this thread arrives at `barrier` when its
// copies so far are complete. The barrier counts one arrival per thread.
TILEWISE_DEVICE void cp_async_mbarrier_arrive(SharedAddress barrier) {
  emulator::cp_async_mbarrier_arrive(barrier);
}
// cp.async.commit_group: this thread's copies since the last one form a group.
TILEWISE_DEVICE void cp_async_commit_group() { emulator::cp_async_commit_group(); }
// cp.async.wait_group: at most kPending of this thread's groups are in flight.
template <int kPending>
TILEWISE_DEVICE void cp_async_wait_group() {
  emulator::cp_async_wait_group(kPending);
}

#else

TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(source));
}
TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source, int bytes_read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(source),
               "r"(bytes_read));
}
TILEWISE_DEVICE void cp_async_4(SharedAddress to, const void* source, int bytes_read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(source),
               "r"(bytes_read));
}
TILEWISE_DEVICE void cp_async_mbarrier_arrive(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
TILEWISE_DEVICE void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
TILEWISE_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

}  // namespace tilewise::cuda::ptx
