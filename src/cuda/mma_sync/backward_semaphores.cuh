// The deterministic backward: key tiles add to dQ one after the other in semaphore order, which is
// the order of the CTAs. A semaphore counts the key tiles that have been added to a row tile.
#pragma once

#include "cuda/mma_sync/backward_key_tile.cuh"
#include "cuda/ptx/block.h"
#include "cuda/ptx/global.h"

namespace tilewise::cuda::mma_sync {

// Thread 0 waits on behalf of the whole CTA.
template <class C>
TILEWISE_DEVICE void wait_semaphore(const int32_t* semaphore, const KeyTile<C>& key_tile,
                                    int32_t row) {
  if (ptx::thread_index() == 0) {
    const int32_t expected = key_tile.semaphore_value(row);
    while (ptx::ld_acquire(semaphore) != expected) {
    }
  }
  ptx::sync_block();
}

TILEWISE_DEVICE void release_semaphore(int32_t* semaphore) {
  ptx::fence_device();
  ptx::sync_block();
  if (ptx::thread_index() == 0) ptx::st_release(semaphore, ptx::ld_acquire(semaphore) + 1);
}

}  // namespace tilewise::cuda::mma_sync
