// Thread and CTA indices, shared memory, CTA-wide barriers and fences, programmatic dependent
// launch.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// %tid.x, %ntid.x, %ctaid.x and %nctaid.x: all grids and CTAs have one dimension.
TILEWISE_DEVICE int thread_index() { return emulator::thread_index(); }
TILEWISE_DEVICE int block_threads() { return emulator::block_threads(); }
TILEWISE_DEVICE int64_t block_index() { return emulator::block_index(); }
TILEWISE_DEVICE int64_t grid_blocks() { return emulator::grid_blocks(); }

// Dynamic shared memory, 1024-byte aligned.
TILEWISE_DEVICE char* shared_memory() { return emulator::shared_memory(); }
// cvta.to.shared
TILEWISE_DEVICE SharedAddress shared_address(const void* p) { return emulator::shared_address(p); }

// bar.sync 0 (__syncthreads)
TILEWISE_DEVICE void sync_block() { emulator::sync_block(); }
// bar.warp.sync (__syncwarp)
TILEWISE_DEVICE void sync_warp() { emulator::sync_warp(); }
// membar.gl (__threadfence): every CTA of the GPU sees this thread's earlier writes before its
// later ones.
TILEWISE_DEVICE void fence_device() {}
// griddepcontrol (sm_90; PTX ISA 9.7.13.13), for programmatic dependent launches.
// `launch_dependents` permits the next kernel to start if it is a dependent launch (runtime.h);
// `wait` returns when the preceding kernel is complete and its writes are visible. `Start` in
// runtime.h says when a dependent kernel has to call it.
TILEWISE_DEVICE void griddepcontrol_wait() { emulator::griddepcontrol_wait(); }
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
