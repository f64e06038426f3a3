// The tile of a block (cuda/common/query_tile.h), where it is kept, and the thread that asks for
// it. Shared memory holds the queries, the record of the work, and what keys and values pass
// through.
#pragma once

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::mma_sync {

TILEWISE_DEVICE int recent_thread() {
  return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index())));
}

template <class C>
inline constexpr int kQueryTileBytes = C::kForward.rows() * C::kHeadDim * C::Element::kBytes;
template <class C>
inline constexpr int kFeedAt = kQueryTileBytes<C> + round_up(sizeof(BlockWork), 128);

// What edge tiles and the end of a block need: registers are for sums.
template <class C>
TILEWISE_DEVICE BlockWork& kept_work() {
  return *reinterpret_cast<BlockWork*>(ptx::shared_memory() + ptx::recent(kQueryTileBytes<C>));
}

}  // namespace tilewise::cuda::mma_sync
