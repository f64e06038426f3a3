// A CUDA family for tests: what a new folder of src/cuda exports.
#pragma once

#include "cuda/family.h"
#include "cuda/kernel_set.h"

namespace tilewise::cuda::toy {

extern const FamilyRow kFamily;

// Its only kernels: forward, bfloat16, head dimension 64.
extern const KernelSet kKernels;

// The arguments of its last launch.
struct Launched {
  int64_t batch = 0;
  void* workspace = nullptr;
};
extern Launched last_launch;

}  // namespace tilewise::cuda::toy
