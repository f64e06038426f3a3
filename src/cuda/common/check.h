// The entries of the index arrays in the memory of the GPU, checked as capi/validate_entries.cpp
// checks those of the CPU, in the same order: the first fault is reported.
#pragma once

#include "attention/index_fault.h"

namespace tilewise::cuda::common {

inline constexpr int kCheckThreads = 512;
inline constexpr int kCheckSharedBytes = kCheckThreads / 32 * 4;
inline constexpr int64_t kCheckBlocks = 1;

struct CheckParams {
  Problem problem{};
  Gradients gradients{};         // of the backward: extents of dbias; else zeros
  IndexFault* report = nullptr;  // written in full, whatever is found
};

// check.cuh: check(CheckParams)

}  // namespace tilewise::cuda::common
