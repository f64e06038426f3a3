// Launches that overlap: see pdl_trigger.h.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"

namespace tilewise::cuda::common {

// A block says so when it has come that far.
TILEWISE_DEVICE void trigger_dependents(const ForwardParams& p, PdlTrigger here) {
  if (p.pdl_trigger == here) ptx::griddepcontrol_launch_dependents();
}

}  // namespace tilewise::cuda::common
