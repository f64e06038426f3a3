// The block: who am I, where is shared memory, barriers.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

TILEWISE_DEVICE int thread_index() { return emulator::thread_index(); }
TILEWISE_DEVICE int block_threads() { return emulator::block_threads(); }
TILEWISE_DEVICE int64_t block_index() { return emulator::block_index(); }
TILEWISE_DEVICE int64_t grid_blocks() { return emulator::grid_blocks(); }

// Dynamic shared memory, 1024-byte aligned; a kernel lays it out as one struct of offsets.
TILEWISE_DEVICE char* shared_memory() { return emulator::shared_memory(); }
TILEWISE_DEVICE SharedAddress shared_address(const void* p) { return emulator::shared_address(p); }

TILEWISE_DEVICE void sync_block() { emulator::sync_block(); }
TILEWISE_DEVICE void sync_warp() { emulator::sync_warp(); }
// Writes before it are seen by the other blocks of the device before writes after it.
TILEWISE_DEVICE void fence_device() {}
// Launches that overlap (sm_90; PTX ISA 9.7.13.13): `launch_dependents` lets the next kernel start
// if it was launched as a dependent one (runtime.h); `wait` waits until the kernel before is
// complete and its writes are visible. A dependent kernel waits in every block.
TILEWISE_DEVICE void griddepcontrol_wait() {}
TILEWISE_DEVICE void griddepcontrol_launch_dependents() {}

#else

TILEWISE_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
TILEWISE_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
TILEWISE_DEVICE int64_t block_index() { return blockIdx.x; }
TILEWISE_DEVICE int64_t grid_blocks() { return gridDim.x; }

TILEWISE_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char tilewise_shared_memory[];
  return tilewise_shared_memory;
}
TILEWISE_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

TILEWISE_DEVICE void sync_block() { __syncthreads(); }
TILEWISE_DEVICE void sync_warp() { __syncwarp(); }
TILEWISE_DEVICE void fence_device() { __threadfence(); }
TILEWISE_DEVICE void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TILEWISE_DEVICE void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

TILEWISE_DEVICE int lane_index() { return thread_index() % kWarpSize; }
TILEWISE_DEVICE int warp_index() { return thread_index() / kWarpSize; }

}  // namespace tilewise::cuda::ptx
