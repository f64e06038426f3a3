// Plans of the wgmma family.
#pragma once

#include "cuda/plan.h"

namespace tilewise::cuda::wgmma {

struct BackwardRegions : BackwardWorkspace {
  Region row_lse;
  FarRowRegions far_rows;  // general form; other forms compute far rows like all (docs/numerics.md)
  Region dq_sum;
  Region descriptors;   // TileDescriptor per CTA
  Region tile_counter;  // BackwardParams::tile_counter
};
BackwardRegions backward_regions(const Request& request, const Plan& plan);

Plan plan_forward(const Problem& p, const KernelSet& kernel_set, const Gpu& gpu);
Plan plan_backward(const Request& request, const KernelSet& kernel_set, const Gpu& gpu,
                   const KernelSet* nan_recompute);

}  // namespace tilewise::cuda::wgmma
