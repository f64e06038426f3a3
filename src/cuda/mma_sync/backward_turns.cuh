// The deterministic backward: key tiles add to dQ one after the other, in the order of the blocks.
#pragma once

#include "cuda/mma_sync/backward_facts.cuh"
#include "cuda/ptx/block.h"
#include "cuda/ptx/global.h"

namespace tilewise::cuda::mma_sync {

// Thread 0 waits and passes on for all.
template <class C>
TILEWISE_DEVICE void wait_for_turn(const int32_t* turn, const BlockFacts<C>& facts, int32_t row) {
  if (ptx::thread_index() == 0) {
    const int32_t mine = facts.turn(row);
    while (ptx::ld_acquire(turn) != mine) {
    }
  }
  ptx::sync_block();
}

TILEWISE_DEVICE void pass_turn(int32_t* turn) {
  ptx::fence_device();
  ptx::sync_block();
  if (ptx::thread_index() == 0) ptx::st_release(turn, ptx::ld_acquire(turn) + 1);
}

}  // namespace tilewise::cuda::mma_sync
