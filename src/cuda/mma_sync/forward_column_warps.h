// Column warps: two or four neighbouring warps have the same rows and divide the head dimension,
// because one warp has no registers for rows of out with more than 256 columns.
//
// Each warp multiplies its columns of Q and K. They exchange these parts of the scores through
// shared memory, and all add them: a + b equals b + a to the last bit, and four parts are added as
// two pairs, so all have the same scores, and each computes the mask, the softmax and the results
// of the rows for itself. Then it sums its columns of V. With 16 rows per warp the exchange of a
// tile of 64 keys at head dimension 512 moves 8 KB, and the operands that a warp loads 72 KB.
//
// What all would do to memory is divided: a warp copies and prepares its `kOwnRows`, and the first
// one stores lse.
#pragma once

#include "cuda/mma_sync/forward_softmax.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/sum_parts.h"

namespace tilewise::cuda::mma_sync {

// The index of the warp among those that have its rows.
template <class C>
TILEWISE_DEVICE int32_t column_warp() {
  return C::kColumnWarps > 1 ? ptx::uniform(ptx::warp_index() % C::kColumnWarps) : 0;
}

// The first column of the warp, in bytes of a row of Q, K or V.
template <class C>
TILEWISE_DEVICE uint32_t first_column_byte() {
  constexpr int kBytes = C::kWarpColumns * C::Element::kBytes;
  static_assert(C::kColumnWarps == 1 || kBytes % 128 == 0, "the swizzle permutes 128 bytes");
  return static_cast<uint32_t>(column_warp<C>() * kBytes);
}

// The rows and columns of out that this thread holds.
template <class C>
TILEWISE_DEVICE LanePosition output_position() {
  LanePosition position = lane_position<C>();
  position.column += column_warp<C>() * C::kWarpColumns;
  return position;
}

// Waits for the warps that have the rows of this one.
template <class C>
TILEWISE_DEVICE void sync_column_warps() {
  if constexpr (C::kColumnWarps == 1) {
    ptx::sync_warp();
  } else {
    constexpr int kFirstBarrier = 2;  // 1 is that of KvPipeline::pages_fit
    ptx::bar_sync(kFirstBarrier + ptx::uniform(ptx::warp_index()) / C::kColumnWarps,
                  C::kColumnWarps * ptx::kWarpSize);
  }
}

// The parts of the scores in shared memory, one per warp.
template <class C>
inline constexpr int kScorePartsBytes =
    C::kColumnWarps > 1 ? C::kForward.warps * tile::kPartBytes<Scores<C>> : 0;

// Adds the parts of the other warps to `s`. A barrier of the CTA before the next tile separates
// these loads from the stores of that tile.
template <class C>
TILEWISE_DEVICE void add_score_parts(Scores<C>& s, ptx::SharedAddress parts) {
  static_assert(C::kColumnWarps == 2 || C::kColumnWarps == 4);
  const int warp = ptx::warp_index();
  tile::store_part(s, tile::lane_part<Scores<C>>(parts, warp));
  sync_column_warps<C>();
  const auto part_of = [&](int other) { return tile::lane_part<Scores<C>>(parts, warp ^ other); };
  tile::add_part(s, part_of(1));
  if constexpr (C::kColumnWarps == 4) tile::add_sum_of_parts(s, part_of(2), part_of(3));
}

}  // namespace tilewise::cuda::mma_sync
