// Keys and values as rows, for pages that are smaller than a box: all lanes copy them, and arrive
// when their copies have landed.
#pragma once

#include "cuda/mma_sync/forward_pages.h"
#include "cuda/mma_sync/forward_slot.h"
#include "cuda/tile/panels.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class RowFill {
 public:
  static constexpr int kArrivals = ptx::kWarpSize;  // at the barrier of a slot
  static constexpr int kForeseen = 4;  // pages may be small: entries of 1024 keys at least
  static constexpr int kForeseenAt = 0;
  static constexpr int kBytes = kForeseenBytes<kForeseen>;  // of shared memory

  TILEWISE_DEVICE static void prepare(const ForwardParams&) {}

  TILEWISE_DEVICE RowFill(const ForwardParams& p, const BlockWork& work, int32_t last,
                          ptx::SharedAddress)
      : work_(work),
        rows_(p, work, last),
        k_(p, p.problem.k, p.problem.head_dim, work),
        v_(p, p.problem.v, p.problem.head_dim_v, work) {}

  TILEWISE_DEVICE void load(bool keys, int32_t tile, const Slot& slot) {
    if (keys) rows_.hand_on(k_, v_, work_, tile);
#pragma unroll
    for (int part = 0; part < Stream::kParts; ++part) (keys ? k_ : v_).copy(slot.at, true, part);
    ptx::cp_async_mbarrier_arrive(slot.barrier);
  }
  // The tile that is read first: rows behind the keys are 0.
  TILEWISE_DEVICE void load_first(bool keys, int32_t tile, const Slot& slot) {
    if (keys) rows_.hand_on(k_, v_, work_, tile);
    (keys ? k_ : v_).copy_whole(slot.at, work_.tiles.keys - tile * C::kForward.keys);
    ptx::cp_async_mbarrier_arrive(slot.barrier);
  }
  TILEWISE_DEVICE int32_t rows_of_first(int32_t) const { return C::kForward.keys; }
  TILEWISE_DEVICE bool pages_fit(const BlockWork& work) const { return rows_.fit(work); }

 private:
  using Lanes = tile::PanelLanes<RingTile<C>, C::kHeadDim * C::Element::kBytes>;
  using Stream = PageStream<C, Lanes>;

  const BlockWork& work_;
  PageRows<C, Lanes> rows_;
  Stream k_;
  Stream v_;
};

}  // namespace tilewise::cuda::mma_sync
