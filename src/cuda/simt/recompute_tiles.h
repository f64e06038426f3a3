// The tiles that a CTA computes: the tile whose number is the CTA's index, or, with flags, its
// share of the tiles that a kernel of another family has flagged to be computed again.
#pragma once

#include "cuda/ptx/warp.h"
#include "cuda/simt/rows.h"

namespace tilewise::cuda::simt {

inline constexpr int32_t kNoTile = -1;

// The first flagged tile among the tiles from, from + grid, from + 2 grid, ... of this CTA, or
// kNoTile. Each thread tests one tile, so a launch with nothing to do takes a load and a barrier.
// All threads of the CTA call it.
TILEWISE_DEVICE int32_t next_flagged(const Flags& flags, int64_t from) {
  const int64_t grid = ptx::grid_blocks();
  for (; from < flags.tiles; from += grid * kThreads) {
    const int64_t tile_of_thread = from + ptx::thread_index() * grid;
    const bool flagged = tile_of_thread < flags.tiles && flags.any(tile_of_thread);
    uint32_t first = kThreads;
    if (ptx::any(flagged)) {
      first = flagged ? ptx::thread_index() : kThreads;
#pragma unroll
      for (int lanes = 1; lanes < ptx::kWarpSize; lanes *= 2)
        first = min(first, ptx::shuffle_xor(first, lanes));
    }
    if (ptx::lane_index() == 0) shared().first_flagged[ptx::warp_index()] = first;
    ptx::sync_block();
    for (uint32_t of_warp : shared().first_flagged) first = min(first, of_warp);
    if (first < kThreads) {
      const auto tile = static_cast<int32_t>(from + first * grid);
      if (ptx::thread_index() == 0) shared().flagged = tile;
      ptx::sync_block();  // `flagged` can be read; the next search may write `first_flagged`
      return tile;
    }
    if (from + grid * kThreads < flags.tiles) ptx::sync_block();
  }
  return kNoTile;
}

// Calls compute(tile) for the tiles of this CTA. Without flags the only tile is the CTA's index.
// The current tile is read from shared memory, so that no register holds it meanwhile.
template <class Compute>
TILEWISE_DEVICE void for_each_tile(const Flags& flags, const Compute& compute) {
  const int64_t block = ptx::block_index();
  int32_t tile = flags.data == nullptr ? static_cast<int32_t>(block) : next_flagged(flags, block);
  while (tile != kNoTile) {
    compute(tile);
    tile = flags.data == nullptr ? kNoTile
                                 : next_flagged(flags, shared().flagged + ptx::grid_blocks());
  }
}

}  // namespace tilewise::cuda::simt
