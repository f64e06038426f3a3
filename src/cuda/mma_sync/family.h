// The mma_sync family on the host.
#pragma once

#include "cuda/family.h"

namespace tilewise::cuda::mma_sync {

extern const FamilyRow kFamily;

}  // namespace tilewise::cuda::mma_sync
