// Which tiles a block takes.
#pragma once

#include "cuda/ptx/warp.h"
#include "cuda/simt/rows.h"

namespace tilewise::cuda::simt {

inline constexpr int32_t kNoTile = -1;

// The first flagged tile at or after `from` among those of this block, which are a grid apart. A
// thread looks at one of them, so a launch with nothing to do is a load and a barrier long. All
// threads of the block call it; kNoTile when there is none.
TILEWISE_DEVICE int32_t next_flagged(const Flags& flags, int64_t from) {
  const int64_t grid = ptx::grid_blocks();
  for (; from < flags.tiles; from += grid * kThreads) {
    const int64_t own = from + ptx::thread_index() * grid;
    const bool flagged = own < flags.tiles && flags.any(own);
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
      ptx::sync_block();  // the next search may write
      return tile;
    }
    if (from + grid * kThreads < flags.tiles) ptx::sync_block();
  }
  return kNoTile;
}

// Tile after tile: `for (t = first_tile(f); t != kNoTile; t = next_tile(f))`. Without flags a block
// takes the tile of its index. No register holds the tile that is being computed.
TILEWISE_DEVICE int32_t first_tile(const Flags& flags) {
  const int64_t own = ptx::block_index();
  return flags.data == nullptr ? static_cast<int32_t>(own) : next_flagged(flags, own);
}
TILEWISE_DEVICE int32_t next_tile(const Flags& flags) {
  return flags.data == nullptr ? kNoTile
                               : next_flagged(flags, shared().flagged + ptx::grid_blocks());
}

}  // namespace tilewise::cuda::simt
