// The simt family on the host.
#pragma once

#include "cuda/family.h"

namespace tilewise::cuda::simt {

extern const FamilyRow kFamily;

}  // namespace tilewise::cuda::simt
