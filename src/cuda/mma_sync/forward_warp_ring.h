// The ring of one warp through which keys and values pass where slots have barriers: who reads a
// slot also fills it, so there is no barrier for free slots. Boxes of TMA fill it, or, where pages
// are small, copies of rows (forward_row_fill.h).
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_box_fill.h"
#include "cuda/mma_sync/forward_merge.h"
#include "cuda/mma_sync/forward_row_fill.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/panels.h"

namespace tilewise::cuda::mma_sync {

// Fill f (K, V of the last tile, K, V of the one before, ...) goes to slot f % slots, and is asked
// for when what lay there has been read: that many fills are on their way while weights are
// computed. Of contiguous keys it may use fewer slots than there are (plan_decode.h).
template <class C>
class WarpRing {
 public:
  static_assert(C::kForward.warps == 1);
  using Arch = typename C::Arch;
  using Fill = std::conditional_t<C::kBoxes, BoxFill<C>, RowFill<C>>;
  using Params = ForwardParamsOf<C>;
  using Tile = RingTile<C>;
  using KeyLanes = tile::PanelOffsets<Tile, tile::Lanes::chunks_first>;
  using ValueLanes = std::conditional_t<
      C::kFloat8, tile::Float8B<C::kConverts, tile::PanelOffsets<Tile, tile::Lanes::rows_first>>,
      tile::PanelB<typename C::Element, Tile>>;
  static_assert(Tile::kBytes == kSlotBytes<C>);
  static constexpr int kStages = C::kForward.stages;
  static constexpr bool kMayUseFewer = C::kBoxes && !C::kPaged && !C::kFloat8;
  static_assert(kMostMergedBytes<C> <= kStages * Tile::kBytes);
  static constexpr int kMergeAt = kStages * 8;  // a barrier behind those of slots
  static constexpr int kFillAt = kMergeAt + 8;
  static constexpr int kRingAt = static_cast<int>(round_up(kFillAt + Fill::kBytes, 1024));
  static constexpr int kBytes = kRingAt + kStages * Tile::kBytes;
  static constexpr int kParts = 1;

  // First of all: what takes time and depends on nothing.
  TILEWISE_DEVICE static void prepare(const Params& p, ptx::SharedAddress base) {
    if (ptx::lane_index() != 0) return;
    Fill::prepare(p);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) ptx::mbarrier_init(base + slot * 8, Fill::kArrivals);
    ptx::mbarrier_init(base + kMergeAt, 1);
    ptx::fence_mbarrier_init();
  }

  // When no more than the sequence is known: what will be waited for.
  TILEWISE_DEVICE static void foresee(const Problem& p, int32_t sequence, ptx::SharedAddress base) {
    if constexpr (C::kPaged)
      foresee_pages<Fill::kForeseen>(p, sequence, base + kFillAt + Fill::kForeseenAt);
  }

  // Of tile `last` and those before it.
  TILEWISE_DEVICE WarpRing(const Params& p, const BlockWork& work, int32_t last,
                           ptx::SharedAddress base)
      : base_(base),
        fill_(p, work, last, base + kFillAt),
        first_(uniform(work.tiles.first)),
        last_(last) {
    if constexpr (kMayUseFewer) {
      if (p.stages > 0) slots_in_use_ = p.stages;
    }
    ptx::sync_warp();  // one lane has made the barriers
  }

  // What a work has however many parts there are of it. The queries are needed with the first keys,
  // before any values.
  template <class Queries>
  TILEWISE_DEVICE void start(Queries&& load_queries) {
    load_first(true, 0);
    load_queries();
    tile::commit<Arch>();
    load_first(false, 1);
  }

  // Tiles before `first` are not wanted. That of a second reader may be one of them, and is waited
  // for: its slots are written again.
  TILEWISE_DEVICE void keep(int32_t first) {
    const bool has_asked = last_ >= first_;
    first_ = uniform(first);
    if (C::kReaders == 1 || !has_asked || last_ >= first_) return;
    ptx::mbarrier_wait_parity(barrier(0), 0);
    ptx::mbarrier_wait_parity(barrier(1), 0);
  }

  // The rest of the ring.
  TILEWISE_DEVICE void fill() {
#pragma unroll
    for (int i = 2; i < kStages; ++i) {
      if (i < slots()) load(i % 2 == 0, last_ - i / 2 * C::kReaders, i);
    }
  }

  // Before the first `arrive`: q has landed.
  TILEWISE_DEVICE void begin() const {
    clear_behind_first();
    tile::wait<Arch, 0>();
    ptx::sync_warp();
  }

  // The tile to be read has landed.
  TILEWISE_DEVICE void arrive() const { ptx::mbarrier_wait_parity(barrier(slot_), phase_); }
  TILEWISE_DEVICE ptx::SharedAddress keys() const { return at(slot_); }
  TILEWISE_DEVICE ptx::SharedAddress values() const { return at(slot_); }

  // Rows behind the keys of the sequence came with the last values of boxes. A masked key has
  // weight 0, and 0 times the NaN of a stranger is NaN; masked scores are replaced, whatever the
  // key.
  TILEWISE_DEVICE void clear_strangers(const BlockWork& work, int32_t tile) const {
    if constexpr (!C::kBoxes) return;
    const int32_t begin = work.tiles.keys - tile * Tile::kRows;
    if (begin >= Tile::kRows) return;
    clear_rows(slot_, begin, rows_of_end(begin));
    ptx::fence_proxy_async();  // the slot is filled again
    ptx::sync_warp();
  }

  // The keys (`scores`) or values of `tile` have been read: the next but slots() - 1 take the slot.
  TILEWISE_DEVICE void release(bool scores, int32_t tile) {
    ptx::sync_warp();
    const bool keys = scores == (slots() % 2 == 0);
    load(keys, tile - (scores ? slots() : slots() + 1) / 2 * C::kReaders, slot_);
    if (++slot_ == slots()) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }
  TILEWISE_DEVICE void ask(bool, int32_t, int) const {}

  // After the loop: whether all pages were those of the tensors.
  TILEWISE_DEVICE bool pages_fit(const BlockWork& work) const {
    return !ptx::any(!fill_.pages_fit(work));
  }
  // Then other blocks may write into the ring.
  TILEWISE_DEVICE void let_go() const {
    if constexpr (!C::kBoxes) ptx::fence_proxy_async();
    ptx::barrier_cluster_arrive_relaxed();
  }
  TILEWISE_DEVICE IdleRing idle() const { return {at(0), base_ + kMergeAt, 0}; }

 private:
  TILEWISE_DEVICE int slots() const {
    if constexpr (kMayUseFewer) return slots_in_use_;
    return kStages;
  }
  TILEWISE_DEVICE ptx::SharedAddress at(int slot) const {
    return base_ + static_cast<uint32_t>(kRingAt + slot * Tile::kBytes);
  }
  TILEWISE_DEVICE ptx::SharedAddress barrier(int slot) const {
    return base_ + static_cast<uint32_t>(slot * 8);
  }

  TILEWISE_DEVICE void load(bool keys, int32_t tile, int slot) {
    if (tile >= first_) fill_.load(keys, tile, {at(slot), barrier(slot)});
  }
  // Of the tile that is read first.
  TILEWISE_DEVICE void load_first(bool keys, int slot) {
    if (last_ >= first_) fill_.load_first(keys, last_, {at(slot), barrier(slot)});
  }

  // While the first tile is on its way: rows that nobody has asked for.
  TILEWISE_DEVICE void clear_behind_first() const {
    const int32_t rows = last_ < first_ ? Tile::kRows : fill_.rows_of_first(last_);
    if (rows == Tile::kRows) return;
    clear_rows(0, rows, Tile::kRows);
    clear_rows(1, rows, Tile::kRows);
    ptx::fence_proxy_async();  // the slots are filled again
  }
  TILEWISE_DEVICE void clear_rows(int slot, int32_t begin, int32_t end) const {
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = begin * 8 + ptx::lane_index(); i < end * 8; i += ptx::kWarpSize) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::st_shared_v4_b32(at(slot) + static_cast<uint32_t>(panel * Tile::kPanelBytes + i * 16),
                              zeros);
    }
  }

  ptx::SharedAddress base_;
  Fill fill_;
  int32_t first_;  // tile that is wanted
  int32_t last_;
  int slots_in_use_ = kStages;
  int slot_ = 0;   // to be read
  int phase_ = 0;  // of its barrier
};

}  // namespace tilewise::cuda::mma_sync
