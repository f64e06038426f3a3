// What device code relies on: compiled by nvcc for a GPU, or by the host compiler for the emulator
// of tests/emulator. Only the headers of this folder know which of the two it is.
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
// A call: what is next to never run costs a kernel neither registers nor instructions on the way.
// Of templates and members. Not beside wgmma, whose sums must not cross one.
#define TILEWISE_COLD __device__ __noinline__
#define TILEWISE_DEVICE_VARIABLE __device__
#define TILEWISE_KERNEL(threads, blocks_per_sm) __global__ __launch_bounds__(threads, blocks_per_sm)
// The grid is a multiple of `blocks`, which run side by side (sm_90).
#define TILEWISE_CLUSTER_KERNEL(threads, blocks) \
  __global__ __launch_bounds__(threads, 1) __cluster_dims__(blocks, 1, 1)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define TILEWISE_PARAMETER const  // Pascal has no __grid_constant__
#else
#define TILEWISE_PARAMETER const __grid_constant__
#endif

#endif

namespace tilewise::cuda::ptx {

// A byte address in the shared memory of the block (the .shared state space).
using SharedAddress = uint32_t;

inline constexpr int kWarpSize = 32;

}  // namespace tilewise::cuda::ptx
