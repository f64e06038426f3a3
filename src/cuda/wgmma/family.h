// The wgmma family on the host.
#pragma once

#include "cuda/family.h"

namespace tilewise::cuda::wgmma {

extern const FamilyRow kFamily;

}  // namespace tilewise::cuda::wgmma
