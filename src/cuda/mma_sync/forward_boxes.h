// Keys and values as boxes of TMA, in a ring like that of forward_ring.h: one lane asks for a tile
// in a few instructions, where all of them spend a fourth of a step on copies and addresses.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_box_places.h"
#include "cuda/mma_sync/forward_merge.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/panels.h"

namespace tilewise::cuda::mma_sync {

// The ring of one warp: who reads a slot also fills it, so there is no barrier for free slots. Fill
// f (K, V of the last tile, K, V of the one before, ...) goes to slot f % kStages, and is asked for
// when what lay there has been read: kStages fills are on their way while weights are computed.
template <class C>
class BoxFeed {
 public:
  static_assert(C::kForward.warps == 1);
  using Arch = typename C::Arch;
  using Places = std::conditional_t<C::kPaged, PageBoxes<C>, RowBoxes<C>>;
  // Its columns have two bytes each.
  using Tile = tile::SwizzledTile<C::kForward.keys, C::kHeadDim * C::Cached::kBytes / 2>;
  using KeyLanes = tile::PanelOffsets<Tile, tile::Lanes::chunks_first>;
  using ValueLanes = std::conditional_t<
      C::kFloat8, tile::Float8B<C::kConverts, tile::PanelOffsets<Tile, tile::Lanes::rows_first>>,
      tile::PanelB<typename C::Element, Tile>>;
  static_assert(Tile::kBytes == kSlotBytes<C>);
  static constexpr int kStages = C::kForward.stages;
  static_assert(kMostMergedBytes<C> <= kStages * Tile::kBytes);
  static constexpr int kPlacesAt = kStages * 8;  // behind the barriers
  static constexpr int kRingAt = static_cast<int>(round_up(kPlacesAt + Places::kBytes, 1024));
  static constexpr int kBytes = kRingAt + kStages * Tile::kBytes;
  static constexpr int kParts = 1;
  static constexpr int kPanelColumns = tile::kSwizzledRowBytes / C::Cached::kBytes;

  // First of all: what takes time and depends on nothing.
  TILEWISE_DEVICE static void prepare(const TmaForwardParams& p, ptx::SharedAddress base) {
    if (ptx::lane_index() != 0) return;
    ptx::prefetch_tensormap(p.k);
    ptx::prefetch_tensormap(p.v);
    ptx::prefetch_tensormap(p.k_end);
    ptx::prefetch_tensormap(p.v_end);
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) ptx::mbarrier_init(base + slot * 8, 1);
    ptx::fence_mbarrier_init();
  }

  // When no more than the sequence is known: what will be waited for.
  TILEWISE_DEVICE static void foresee(const Problem& p, int32_t sequence, ptx::SharedAddress base) {
    if constexpr (C::kPaged) foresee_pages<1>(p, sequence, base + kPlacesAt + Places::kForeseenAt);
  }

  // Of tile `last` and those before it.
  TILEWISE_DEVICE BoxFeed(const TmaForwardParams& p, const BlockWork& work, int32_t last,
                          ptx::SharedAddress base)
      : p_(p),
        base_(base),
        places_(p, work, last, base + kPlacesAt),
        head_(uniform(p.group.quotient(work.rows.first_head))),
        first_(uniform(work.tiles.first)),
        last_(last) {}

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
    for (int i = 2; i < kStages; ++i) load(i % 2 == 0, last_ - i / 2 * C::kReaders, i);
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

  // Rows behind the keys of the sequence came with its last values. A masked key has weight 0, and
  // 0 times the NaN of a stranger is NaN; masked scores are replaced, whatever the key.
  TILEWISE_DEVICE void clear_strangers(const BlockWork& work, int32_t tile) const {
    const int32_t begin = work.tiles.keys - tile * Tile::kRows;
    if (begin >= Tile::kRows) return;
    clear_rows(slot_, begin, rows_of_end(begin));
    ptx::fence_proxy_async();  // the slot is filled again
    ptx::sync_warp();
  }

  // The keys (`scores`) or values of `tile` have been read: the next but kStages - 1 take the slot.
  TILEWISE_DEVICE void release(bool scores, int32_t tile) {
    ptx::sync_warp();
    const bool keys = scores == (kStages % 2 == 0);
    load(keys, tile - (scores ? kStages : kStages + 1) / 2 * C::kReaders, slot_);
    if (++slot_ == kStages) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }
  TILEWISE_DEVICE void ask(bool, int32_t, int) const {}

  // After the loop: other blocks may write into the ring.
  TILEWISE_DEVICE void let_go() const { ptx::barrier_cluster_arrive_relaxed(); }
  TILEWISE_DEVICE IdleRing idle() const {
    return {at(0), barrier(0), slot_ == 0 ? phase_ : phase_ ^ 1};
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int slot) const {
    return base_ + static_cast<uint32_t>(kRingAt + slot * Tile::kBytes);
  }
  TILEWISE_DEVICE ptx::SharedAddress barrier(int slot) const {
    return base_ + static_cast<uint32_t>(slot * 8);
  }

  TILEWISE_DEVICE void load(bool keys, int32_t tile, int slot) {
    if (tile < first_) return;
    places_.visit(tile, expect(slot), copy(keys ? p_.k : p_.v, slot));
    if (!keys) places_.pass(tile);
  }
  // Of the tile that is read first.
  TILEWISE_DEVICE void load_first(bool keys, int slot) {
    if (last_ < first_) return;
    places_.visit_first(last_, expect(slot), copy(keys ? p_.k : p_.v, slot),
                        copy(keys ? p_.k_end : p_.v_end, slot));
    if (!keys) places_.pass(last_);
  }

  // While the first tile is on its way: rows that nobody has asked for.
  TILEWISE_DEVICE void clear_behind_first() const {
    const int32_t rows = last_ < first_ ? Tile::kRows : places_.rows_of_first(last_);
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

  TILEWISE_DEVICE auto expect(int slot) const {
    return [this, slot](int32_t rows) {
      ptx::mbarrier_arrive_expect_tx(barrier(slot), rows * (Tile::kBytes / Tile::kRows));
    };
  }
  // Columns and rows that the tensor does not have arrive as 0.
  TILEWISE_DEVICE auto copy(const TensorMap& map, int slot) const {
    return [this, &map, slot](int32_t begin, int32_t row, int32_t index) {
      const ptx::SharedAddress to =
          at(slot) + static_cast<uint32_t>(begin * tile::kSwizzledRowBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::cp_async_bulk_tensor_load(to + panel * Tile::kPanelBytes, map, panel * kPanelColumns,
                                       row, head_, index, barrier(slot),
                                       ptx::CachePolicy::evict_normal);
    };
  }

  const TmaForwardParams& p_;
  ptx::SharedAddress base_;
  Places places_;
  int32_t head_;
  int32_t first_;  // tile that is wanted
  int32_t last_;
  int slot_ = 0;   // to be read
  int phase_ = 0;  // of its barrier
};

}  // namespace tilewise::cuda::mma_sync
