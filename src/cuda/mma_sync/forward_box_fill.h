// Keys and values as boxes of TMA: one lane asks for a tile in a few instructions, where all of
// them spend a fourth of a step on copies and addresses.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_box_places.h"
#include "cuda/mma_sync/forward_slot.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class BoxFill {
 public:
  using Places = std::conditional_t<C::kPaged, PageBoxes<C>, RowBoxes<C>>;
  using Tile = RingTile<C>;
  static constexpr int kArrivals = 1;            // at the barrier of a slot, and the bytes
  static constexpr int kBytes = Places::kBytes;  // of shared memory
  static constexpr int kForeseen = 1;
  static constexpr int kForeseenAt = Places::kForeseenAt;

  TILEWISE_DEVICE static void prepare(const TmaForwardParams& p) {
    ptx::prefetch_tensormap(p.k);
    ptx::prefetch_tensormap(p.v);
    ptx::prefetch_tensormap(p.k_tail);
    ptx::prefetch_tensormap(p.v_tail);
  }

  TILEWISE_DEVICE BoxFill(const TmaForwardParams& p, const BlockWork& work, int32_t last,
                          ptx::SharedAddress shared)
      : p_(p),
        places_(p, work, last, shared),
        head_(uniform(p.group.quotient(work.rows.first_head))) {}

  TILEWISE_DEVICE void load(bool keys, int32_t tile, const Slot& slot) {
    places_.visit(tile, expect(slot), copy(keys ? p_.k : p_.v, slot));
    if (!keys) places_.pass(tile);
  }
  // The tile that is read first. What `rows_of_first` does not count is not written.
  TILEWISE_DEVICE void load_first(bool keys, int32_t tile, const Slot& slot) {
    places_.visit_first(tile, expect(slot), copy(keys ? p_.k : p_.v, slot),
                        copy(keys ? p_.k_tail : p_.v_tail, slot));
    if (!keys) places_.pass(tile);
  }
  TILEWISE_DEVICE int32_t rows_of_first(int32_t tile) const { return places_.rows_of_first(tile); }
  TILEWISE_DEVICE bool pages_fit(const BlockWork&) const { return places_.fit(); }

 private:
  static constexpr int kPanelColumns = tile::kSwizzledRowBytes / C::Cached::kBytes;

  TILEWISE_DEVICE auto expect(const Slot& slot) const {
    return [slot](int32_t rows) {
      ptx::mbarrier_arrive_expect_tx(slot.barrier, rows * (Tile::kBytes / Tile::kRows));
    };
  }
  // Columns and rows that the tensor does not have arrive as 0.
  TILEWISE_DEVICE auto copy(const TensorMap& map, const Slot& slot) const {
    return [this, &map, slot](int32_t begin, int32_t row, int32_t index) {
      const ptx::SharedAddress to =
          slot.at + static_cast<uint32_t>(begin * tile::kSwizzledRowBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::cp_async_bulk_tensor_load(to + panel * Tile::kPanelBytes, map, panel * kPanelColumns,
                                       row, head_, index, slot.barrier,
                                       ptx::CachePolicy::evict_normal);
    };
  }

  const TmaForwardParams& p_;
  Places places_;
  int32_t head_;
};

}  // namespace tilewise::cuda::mma_sync
