// Launches that overlap: see next_start.h.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"

namespace tilewise::cuda::common {

// A block says so when it has come that far.
TILEWISE_DEVICE void let_next_in(const ForwardParams& p, NextStart here) {
  if (p.next == here) ptx::griddepcontrol_launch_dependents();
}

}  // namespace tilewise::cuda::common
