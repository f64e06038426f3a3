// Checks the entries of index arrays in GPU memory (`check = 1`) as capi/validate_entries.cpp
// checks those in CPU memory, in the same order, and reports the first fault.
#pragma once

#include "attention/index_fault.h"

namespace tilewise::cuda::common {

inline constexpr int kCheckThreads = 512;
inline constexpr int kCheckSharedBytes = kCheckThreads / 32 * 4;
inline constexpr int64_t kCheckBlocks = 1;

struct CheckParams {
  Problem problem{};
  Gradients gradients{};         // backward: the extents of dbias; forward: zeros
  IndexFault* report = nullptr;  // always written in full; Fault::none if all entries are valid
};

// check.cuh: check(CheckParams)

}  // namespace tilewise::cuda::common
