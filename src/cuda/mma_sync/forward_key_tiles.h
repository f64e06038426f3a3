// The loop over the key tiles of a CTA.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_mask.h"

namespace tilewise::cuda::mma_sync {

// Calls step(tile, masked) for every visible key tile from `last` down. `masked` says whether the
// band may hide pairs of the tile; in the fast path it is a constant, std::true_type or false_type.
template <class C, class Step>
TILEWISE_DEVICE void for_each_key_tile(const KeyTiles& tiles, int32_t last, Step& step) {
  int32_t tile = last;
  if constexpr (C::kMasked) {
#pragma unroll 1
    for (; tile >= tiles.first; tile = masked_tiles<C>().before(tile))
      step(tile, tiles.masked(tile));
  } else if constexpr (C::kGeneral) {
#pragma unroll 1
    for (; tile >= tiles.first; tile -= C::kWarpSplits) step(tile, tiles.masked(tile));
  } else {
#pragma unroll 1
    while (tile >= tiles.first) {
      if (tile < tiles.full_end) {
        const int32_t full_begin = ptx::uniform(tiles.full_begin);
#pragma unroll 1
        for (; tile >= full_begin; tile -= C::kWarpSplits) step(tile, std::false_type{});
      }
      if (tile < tiles.first) break;
      step(tile, std::true_type{});
      tile -= C::kWarpSplits;
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
