// A slot of the ring of a warp (forward_warp_ring.h).
#pragma once

#include "cuda/ptx/platform.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

struct Slot {
  ptx::SharedAddress at;
  ptx::SharedAddress barrier;  // a phase of it ends when all of a tile has landed
};

// What lies in a slot, as if its columns had two bytes each.
template <class C>
using RingTile = tile::SwizzledTile<C::kForward.keys, C::kHeadDim * C::Cached::kBytes / 2>;

}  // namespace tilewise::cuda::mma_sync
