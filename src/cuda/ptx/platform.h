// The base of all device code. nvcc compiles it for a GPU, or the host compiler for the emulator of
// tests/emulator; only the headers of this folder know which of the two it is.
#pragma once

#include "base/platform.h"

#if defined(TILEWISE_EMULATOR)

#include "emulator/device.h"
#define TILEWISE_DEVICE inline __attribute__((always_inline))
#define TILEWISE_COLD __attribute__((noinline))
#define TILEWISE_DEVICE_VARIABLE
#define TILEWISE_KERNEL(threads, blocks_per_sm) inline
#define TILEWISE_CLUSTER_KERNEL(threads, blocks) inline
#define TILEWISE_PARAMETER const

#else

#include <cuda_runtime.h>
#define TILEWISE_DEVICE __device__ __forceinline__
// A function that is called instead of inlined, so that rare code costs a kernel neither registers
// nor instructions. For templates and members only. It must not stand between wgmma instructions,
// because their sums cannot live across a call.
#define TILEWISE_COLD __device__ __noinline__
#define TILEWISE_DEVICE_VARIABLE __device__
#define TILEWISE_KERNEL(threads, blocks_per_sm) __global__ __launch_bounds__(threads, blocks_per_sm)
// A kernel in clusters of `blocks` CTAs (sm_90); the grid is a multiple of that.
#define TILEWISE_CLUSTER_KERNEL(threads, blocks) \
  __global__ __launch_bounds__(threads, 1) __cluster_dims__(blocks, 1, 1)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define TILEWISE_PARAMETER const  // Pascal has no __grid_constant__
#else
#define TILEWISE_PARAMETER const __grid_constant__
#endif

#endif

namespace tilewise::cuda::ptx {

// A byte address in the shared memory of the CTA (the .shared state space).
using SharedAddress = uint32_t;

inline constexpr int kWarpSize = 32;

}  // namespace tilewise::cuda::ptx
