// The tcgen05 family on the host.
#pragma once

#include "cuda/family.h"

namespace tilewise::cuda::tcgen05 {

extern const FamilyRow kFamily;

}  // namespace tilewise::cuda::tcgen05
