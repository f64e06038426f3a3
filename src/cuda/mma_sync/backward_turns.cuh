// The deterministic backward: key tiles add to dQ one after the other, in the order of the blocks.
#pragma once

#include "cuda/mma_sync/backward_plan.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/global.h"

namespace tilewise::cuda::mma_sync {

// How many key tiles add to a tile of rows before key tile `tile` does. Blocks are numbered in the
// same order (TileOrder), so a block waits for earlier ones only.
template <class C>
TILEWISE_DEVICE int32_t turn_of(const Band& band, int64_t row, int64_t tile, bool last_first) {
  const Range rows = {row, min(band.rows, row + BackwardPlan<C>::kQueries)};
  const Range tiles =
      Tiling{band.keys, BackwardPlan<C>::kKeys}.touching(band.keys_of_any(rows));
  return static_cast<int32_t>(last_first ? tiles.end - 1 - tile : tile - tiles.begin);
}

TILEWISE_DEVICE void wait_for_turn(const int32_t* turn, int32_t mine) {
  if (ptx::thread_index() == 0) {
    while (ptx::ld_acquire(turn) != mine) {
    }
  }
  ptx::sync_block();
}

TILEWISE_DEVICE void pass_turn(int32_t* turn, int32_t mine) {
  ptx::fence_device();
  ptx::sync_block();
  if (ptx::thread_index() == 0) ptx::st_release(turn, mine + 1);
}

}  // namespace tilewise::cuda::mma_sync
