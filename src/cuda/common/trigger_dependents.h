// The PDL trigger of the forward kernels: see pdl_trigger.h.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"

namespace tilewise::cuda::common {

// A kernel calls it at every possible trigger point; only the point that the plan has chosen
// triggers.
TILEWISE_DEVICE void trigger_dependents(const ForwardParams& p, PdlTrigger here) {
  if (p.pdl_trigger == here) ptx::griddepcontrol_launch_dependents();
}

}  // namespace tilewise::cuda::common
