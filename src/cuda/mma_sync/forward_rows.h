// The tile of a block (cuda/common/query_tile.h), where it is saved, and the thread that asks for
// it. Shared memory holds the queries, the record of the q_tile, and what keys and values pass
// through.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

// The warps of a block share the rows of its tile, or, if it reads boxes, the keys: each of them
// has all rows then, and what a block of one warp has.
template <class C>
TILEWISE_DEVICE int row_thread() {
  return C::kWarpSplits > 1 ? ptx::lane_index() : ptx::thread_index();
}
template <class C>
TILEWISE_DEVICE int recent_thread() {
  return static_cast<int>(ptx::opaque(static_cast<uint32_t>(row_thread<C>())));
}

// Of a tile of keys in the ring. Those of a warp have rows of whole panels.
template <class C>
inline constexpr int kStageBytes =
    C::kForward.keys * static_cast<int>(round_up(C::kHeadDim * C::KvElement::kBytes,
                                                 C::kWarpPipeline ? tile::kSwizzledRowBytes : 16));
template <class C>
inline constexpr int kQueryTileBytes = C::kForward.rows() * C::kHeadDim * C::Element::kBytes;
// Panels are swizzled by their address, with a period of 1024 bytes.
template <class C>
inline constexpr int kPipelineAt = static_cast<int>(
    round_up(kQueryTileBytes<C> + sizeof(QueryTile), C::kWarpPipeline ? 1024 : 128));
template <class C>
using ForwardParamsOf = std::conditional_t<C::kTma, TmaForwardParams, ForwardParams>;

// Two neighbours of a row of out.
template <class C>
TILEWISE_DEVICE uint32_t pack_output(const Problem& p, float low, float high) {
  if constexpr (!C::kFloat8)
    return tile::pack<typename C::Element>(low, high);
  else
    return p.dtype == TILEWISE_BFLOAT16 ? tile::pack<BF16>(low, high) : tile::pack<F16>(low, high);
}

// The rows of a warp as packed rows of q or out, which it copies in passes. A lane works out where
// one of them lies, and tells the others: products of 64 bits for each row take longer. (H100, 128
// sequences of 1k keys with 16 rows: 28.2 -> 27.8 us, of uneven lengths 17.4 -> 16.8.)
template <class C>
class PackedRows {
 public:
  static constexpr int kRows = C::kForward.warp_rows;
  static_assert(kRows <= ptx::kWarpSize);
  using Lanes = tile::CopyLanes<ptx::kWarpSize, kRows, C::kHeadDim * C::Element::kBytes>;
  static constexpr int kAtOnce = C::kWarpPipeline ? 4 : 1;  // passes

  TILEWISE_DEVICE PackedRows(const QueryTile& q_tile, const tilewise_tensor& view)
      : lanes(recent_thread<C>() % ptx::kWarpSize),
        first_(recent_thread<C>() / ptx::kWarpSize * kRows),
        left_(q_tile.rows.count - first_ - lanes.row) {
    const int own = recent_thread<C>() % kRows;
    offset_ = q_tile.offset(view, first_ + own) * C::Element::kBytes;
  }

  // Of the tile.
  TILEWISE_DEVICE int first() const { return first_; }
  TILEWISE_DEVICE bool exists(int pass) const { return Lanes::rows_to(pass) < left_; }
  // Bytes, where the row exists. Whole warps call it.
  TILEWISE_DEVICE int64_t offset(int pass) const {
    return ptx::shuffle(offset_, lanes.row_of(pass) % kRows);
  }

  const Lanes lanes;

 private:
  int first_;
  int32_t left_;
  int64_t offset_;
};

// What edge tiles and the end of a block need: registers are for sums.
template <class C>
TILEWISE_DEVICE QueryTile& saved_q_tile(uint32_t first_byte = 0) {
  return *reinterpret_cast<QueryTile*>(ptx::shared_memory() +
                                       ptx::opaque(first_byte + kQueryTileBytes<C>));
}

}  // namespace tilewise::cuda::mma_sync
