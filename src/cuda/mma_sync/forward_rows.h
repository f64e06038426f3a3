// The tile of a block (cuda/common/query_tile.h), where it is kept, and the thread that asks for
// it. Shared memory holds the queries, the record of the work, and what keys and values pass
// through.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

TILEWISE_DEVICE int recent_thread() {
  return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index())));
}

// Of a tile of keys in the ring. Rows of boxes are whole panels.
template <class C>
inline constexpr int kSlotBytes =
    C::kForward.keys * static_cast<int>(round_up(C::kHeadDim * C::Cached::kBytes,
                                                 C::kBoxes ? tile::kSwizzledRowBytes : 16));
template <class C>
inline constexpr int kQueryTileBytes = C::kForward.rows() * C::kHeadDim * C::Element::kBytes;
// Boxes are swizzled by their address, with a period of 1024 bytes.
template <class C>
inline constexpr int kFeedAt =
    static_cast<int>(round_up(kQueryTileBytes<C> + sizeof(BlockWork), C::kBoxes ? 1024 : 128));
template <class C>
using ForwardParamsOf = std::conditional_t<C::kBoxes, TmaForwardParams, ForwardParams>;

// Two neighbours of a row of out.
template <class C>
TILEWISE_DEVICE uint32_t pack_output(const Problem& p, float low, float high) {
  if constexpr (!C::kFloat8)
    return tile::pack<typename C::Element>(low, high);
  else
    return p.dtype == TILEWISE_BFLOAT16 ? tile::pack<BF16>(low, high) : tile::pack<F16>(low, high);
}

// What edge tiles and the end of a block need: registers are for sums.
template <class C>
TILEWISE_DEVICE BlockWork& kept_work() {
  return *reinterpret_cast<BlockWork*>(ptx::shared_memory() + ptx::recent(kQueryTileBytes<C>));
}

}  // namespace tilewise::cuda::mma_sync
