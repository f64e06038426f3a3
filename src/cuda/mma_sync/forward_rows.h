// The tile of a block (cuda/common/query_tile.h), where it is kept, and the thread that asks for
// it. Shared memory holds the queries, the record of the work, and what keys and values pass
// through.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::mma_sync {

TILEWISE_DEVICE int recent_thread() {
  return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index())));
}

template <class C>
inline constexpr int kQueryTileBytes = C::kForward.rows() * C::kHeadDim * C::Element::kBytes;
// Boxes are swizzled by their address, with a period of 1024 bytes.
template <class C>
inline constexpr int kFeedAt =
    static_cast<int>(round_up(kQueryTileBytes<C> + sizeof(BlockWork), C::kBoxes ? 1024 : 128));
template <class C>
using ForwardParamsOf = std::conditional_t<C::kBoxes, TmaForwardParams, ForwardParams>;

// What edge tiles and the end of a block need: registers are for sums.
template <class C>
TILEWISE_DEVICE BlockWork& kept_work() {
  return *reinterpret_cast<BlockWork*>(ptx::shared_memory() + ptx::recent(kQueryTileBytes<C>));
}

}  // namespace tilewise::cuda::mma_sync
