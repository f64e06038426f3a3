// A stage of a WarpPipeline (forward_warp_pipeline.h).
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

struct Stage {
  ptx::SharedAddress at;
  ptx::SharedAddress barrier;  // full barrier: a phase completes when the whole tile has arrived
};

// The tile in a stage, as if its columns had two bytes each.
template <class C>
using StageTile = tile::SwizzledTile<C::kForward.keys, C::kHeadDim * C::KvElement::kBytes / 2>;

}  // namespace tilewise::cuda::mma_sync
