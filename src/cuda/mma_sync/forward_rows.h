// The query tile of a CTA (cuda/common/query_tile.h): its rows, and the layout of shared memory,
// which holds the queries, the saved QueryTile, the MaskedTiles of the masked form and the pipeline
// of keys and values.
#pragma once

#include <type_traits>

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::mma_sync {

// The index of a thread among those that split the rows of the tile: all threads of the CTA, or the
// lanes of a warp when warps split the keys instead, so that each of them has all rows.
template <class C>
TILEWISE_DEVICE int row_thread() {
  return C::kWarpSplits > 1 ? ptx::lane_index() : ptx::thread_index();
}
template <class C>
TILEWISE_DEVICE int opaque_thread() {
  return static_cast<int>(ptx::opaque(static_cast<uint32_t>(row_thread<C>())));
}

// The index of a thread among those that hold different rows: column warps hold the same ones.
template <class C>
TILEWISE_DEVICE int thread_of_rows(int thread) {
  if constexpr (C::kColumnWarps == 1) return thread;
  constexpr int kThreads = C::kColumnWarps * ptx::kWarpSize;
  return thread / kThreads * ptx::kWarpSize + thread % ptx::kWarpSize;
}

// The rows that a warp copies or prepares on its own: column warps divide theirs. Warp w has those
// from kOwnRows * w on.
template <class C>
inline constexpr int kOwnRows = C::kForward.warp_rows / C::kColumnWarps;

// Threads that copy rows together, and their rows: those of one warp, or of the two warps whose
// eight rows are a period of the swizzle.
template <class C>
inline constexpr int kCopyWarps = max(1, 8 / kOwnRows<C>);
template <class C>
inline constexpr int kCopyThreads = kCopyWarps<C> * ptx::kWarpSize;
template <class C>
inline constexpr int kCopyRows = kCopyWarps<C> * kOwnRows<C>;

// A stage holds a tile of keys or values. Those of a WarpPipeline have rows of whole swizzle
// panels.
template <class C>
inline constexpr int kStageBytes =
    C::kForward.keys * static_cast<int>(round_up(C::kHeadDim * C::KvElement::kBytes,
                                                 C::kWarpPipeline ? tile::kSwizzledRowBytes : 16));
template <class C>
inline constexpr int kQueryTileBytes = C::kForward.rows() * C::kHeadDim * C::Element::kBytes;
template <class C>
class MaskedTiles;  // forward_mask.h
template <class C>
inline constexpr int kMaskAt =
    static_cast<int>(round_up(kQueryTileBytes<C> + sizeof(QueryTile), 16));
template <class C>
constexpr int mask_bytes() {
  if constexpr (C::kMasked) return sizeof(MaskedTiles<C>);
  return 0;
}
// Panels are swizzled by their address, with a period of 1024 bytes.
template <class C>
inline constexpr int kPipelineAt =
    static_cast<int>(round_up(kMaskAt<C> + mask_bytes<C>(), C::kWarpPipeline ? 1024 : 128));
template <class C>
using ForwardParamsOf = std::conditional_t<C::kTma, TmaForwardParams, ForwardParams>;

// Packs two neighbouring columns of out.
template <class C>
TILEWISE_DEVICE uint32_t pack_output(const Problem& p, float low, float high) {
  if constexpr (!C::kFloat8)
    return tile::pack<typename C::Element>(low, high);
  else
    return p.dtype == TILEWISE_BFLOAT16 ? tile::pack<BF16>(low, high) : tile::pack<F16>(low, high);
}

// The packed rows of q or out that kCopyThreads copy, in passes. Each lane computes the offset of
// one row and passes it to the others, because 64-bit products for every row take longer. (H100,
// 128 sequences of 1k keys with 16 rows: 28.2 -> 27.8 us; varlen 17.4 -> 16.8 us.)
template <class C>
class PackedRows {
 public:
  static constexpr int kRows = kCopyRows<C>;
  static_assert(kRows <= ptx::kWarpSize);
  using Lanes = tile::CopyLanes<kCopyThreads<C>, kRows, C::kHeadDim * C::Element::kBytes>;
  static constexpr int kPassesInFlight = C::kWarpPipeline ? 4 : 1;

  TILEWISE_DEVICE PackedRows(const QueryTile& q_tile, const tilewise_tensor& view)
      : lanes(opaque_thread<C>() % kCopyThreads<C>),
        first_(opaque_thread<C>() / kCopyThreads<C> * kRows),
        left_(q_tile.rows.count - first_ - lanes.row) {
    const int row = opaque_thread<C>() % kRows;
    offset_ = q_tile.offset(view, first_ + row) * C::Element::kBytes;
  }

  // The first row of these threads in the tile.
  TILEWISE_DEVICE int first() const { return first_; }
  TILEWISE_DEVICE bool exists(int pass) const { return Lanes::rows_to(pass) < left_; }
  // In bytes, valid where the row exists. All lanes of the warp call it.
  TILEWISE_DEVICE int64_t offset(int pass) const {
    return ptx::shuffle(offset_, lanes.row_of(pass) % kRows);
  }

  const Lanes lanes;

 private:
  int first_;
  int32_t left_;
  int64_t offset_;
};

// The query tile, saved for masked tiles and for the epilogue because registers are needed for
// sums. Its address is opaque, so that it is computed at each use instead of being kept.
template <class C>
TILEWISE_DEVICE QueryTile& saved_q_tile(uint32_t first_byte = 0) {
  return *reinterpret_cast<QueryTile*>(ptx::shared_memory() +
                                       ptx::opaque(first_byte + kQueryTileBytes<C>));
}

}  // namespace tilewise::cuda::mma_sync
