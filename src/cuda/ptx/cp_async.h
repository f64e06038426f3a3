// Copies from global to shared memory that run beside the arithmetic (sm_80). PTX ISA 9.7.9:
// cp.async. The bytes not read from `source` are written as 0.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source) {
  emulator::cp_async(to, source, 16, 16);
}
TILEWISE_DEVICE void cp_async_16(SharedAddress to, const void* source, int bytes_read) {
  emulator::cp_async(to, source, 16, bytes_read);
}
TILEWISE_DEVICE void cp_async_4(SharedAddress to, const void* source, int bytes_read) {
  emulator::cp_async(to, source, 4, bytes_read);
}
TILEWISE_DEVICE void cp_async_mbarrier_arrive(SharedAddress barrier) {
  emulator::cp_async_mbarrier_arrive(barrier);
}
TILEWISE_DEVICE void cp_async_commit_group() { emulator::cp_async_commit_group(); }
// Waits until at most `kPending` of this thread's groups are in flight.
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
// When what this thread has asked for so far has landed, it arrives at `barrier`, which counts one
// arrival of each thread (PTX ISA 9.7.13.15: cp.async.mbarrier.arrive.noinc).
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
