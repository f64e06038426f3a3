// A stage of the ring of a warp (forward_warp_pipeline.h).
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

struct Stage {
  ptx::SharedAddress at;
  ptx::SharedAddress barrier;  // a phase of it ends when all of a tile has landed
};

// What lies in a stage, as if its columns had two bytes each.
template <class C>
using StageTile = tile::SwizzledTile<C::kForward.keys, C::kHeadDim * C::KvElement::kBytes / 2>;

}  // namespace tilewise::cuda::mma_sync
