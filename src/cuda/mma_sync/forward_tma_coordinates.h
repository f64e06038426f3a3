// The coordinates of the TMA boxes of a key tile: the two policies of `TmaLoader`.
#pragma once

#include "cuda/mma_sync/forward_pages.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::mma_sync {

// Rows of the tail boxes that hold the last `left` keys.
TILEWISE_DEVICE int32_t tail_box_rows(int32_t left) {
  return (left + kTailBoxRows - 1) / kTailBoxRows * kTailBoxRows;
}

// Rows of a sequence are contiguous, so one box holds a tile; its coordinates are a row and the
// index of the sequence. The tile that contains the last key is loaded in smaller tail boxes,
// without those past the last key, which would cost half a tile of reads on average.
template <class C>
class ContiguousCoordinates {
 public:
  static constexpr int kKeys = C::kForward.keys;
  static_assert(kKeys % kTailBoxRows == 0);
  static constexpr int kBytes = 0;  // of shared memory
  static constexpr int kPrefetchAt = 0;

  TILEWISE_DEVICE ContiguousCoordinates(const TmaForwardParams&, const QueryTile& q_tile, int32_t,
                                        ptx::SharedAddress)
      : row_(ptx::uniform(static_cast<int32_t>(q_tile.sequence.kv.first))),
        sequence_(ptx::uniform(static_cast<int32_t>(q_tile.sequence.kv.batch_index))),
        keys_(q_tile.tiles.keys) {}

  // Calls expect(rows), then copy(first row in the tile, row, index) for each box of `tile`, in one
  // lane.
  template <class Expect, class Copy>
  TILEWISE_DEVICE void visit(int32_t tile, const Expect& expect, const Copy& copy) const {
    if (ptx::lane_index() != 0) return;
    expect(kKeys);
    copy(0, row_ + tile * kKeys, sequence_);
  }

  // The same for the tile that is read first, the only one that may contain the last key; there it
  // calls copy_end for boxes of kTailBoxRows rows.
  template <class Expect, class Copy, class CopyEnd>
  TILEWISE_DEVICE void visit_first(int32_t tile, const Expect& expect, const Copy& copy,
                                   const CopyEnd& copy_end) const {
    const int32_t rows = first_tile_rows(tile);
    if (rows == kKeys) return visit(tile, expect, copy);
    if (ptx::lane_index() != 0) return;
    expect(rows);
#pragma unroll 1
    for (int32_t begin = 0; begin < rows; begin += kTailBoxRows)
      copy_end(begin, row_ + tile * kKeys + begin, sequence_);
  }
  // The rows that `visit_first` loads.
  TILEWISE_DEVICE int32_t first_tile_rows(int32_t tile) const {
    return min(kKeys, tail_box_rows(keys_ - tile * kKeys));
  }

  // Called when the loads of keys and values of `tile` have been issued.
  TILEWISE_DEVICE void advance(int32_t) {}

 private:
  int32_t row_;  // of key 0
  int32_t sequence_;
  int32_t keys_;
};

// A box holds a page, or as much of a larger page as a tile holds; its coordinates are a row of the
// page and the page. Lane i looks up the page of box i. The pages of the tile to be loaded next lie
// in shared memory and those of the tile after it are being loaded, so that no copy waits for the
// block table.
template <class C>
class PagedCoordinates {
 public:
  static constexpr int kKeys = C::kForward.keys;
  static_assert((kKeys & (kKeys - 1)) == 0);  // so that pages that divide it hold whole tail boxes
  static constexpr int kMaxBoxes = static_cast<int>(ceil_div(kKeys, kMinTmaPageRows));
  static constexpr int32_t kSmallPage = 16;  // rows
  static constexpr int kPrefetchAt = kMaxBoxes * 4;
  static constexpr int kBytes = kPrefetchAt + kPrefetchBytes<1>;

  TILEWISE_DEVICE PagedCoordinates(const TmaForwardParams& p, const QueryTile& q_tile, int32_t last,
                                   ptx::SharedAddress shared)
      : size_(p.page_size),
        box_rows_(min(static_cast<int32_t>(p.page_size), kKeys)),
        shared_(shared),
        table_(q_tile.sequence.kv.pages),
        last_page_(q_tile.sequence.kv.last_page),
        keys_(q_tile.tiles.keys),
        first_(q_tile.tiles.first) {
    const uint32_t pages = look_up(last);
    next_pages_ = look_up(last - C::kWarpSplits);
    store_pages(pages);
  }

  template <class Expect, class Copy>
  TILEWISE_DEVICE void visit(int32_t tile, const Expect& expect, const Copy& copy) const {
    if (!ptx::elect_one()) return;
    expect(kKeys);
    const int32_t row = size_.remainder(tile * kKeys);  // 0 where pages are no larger than a tile
    uint32_t pages[kMaxBoxes];
#pragma unroll
    for (int i = 0; i < kMaxBoxes; ++i)
      pages[i] = ptx::ld_shared_b32(shared_ + static_cast<uint32_t>(i * 4));
#pragma unroll
    for (int i = 0; i < kMaxBoxes && i * box_rows_ < kKeys; ++i)
      copy(i * box_rows_, row, static_cast<int32_t>(pages[i]));
  }

  // Pages of up to kSmallPage rows are loaded whole: half of one would save few rows, and a tile
  // takes many boxes already.
  template <class Expect, class Copy, class CopyEnd>
  TILEWISE_DEVICE void visit_first(int32_t tile, const Expect& expect, const Copy& copy,
                                   const CopyEnd& copy_end) const {
    const int32_t rows = first_tile_rows(tile);
    if (rows == kKeys) return visit(tile, expect, copy);
    if (!ptx::elect_one()) return;
    expect(rows);
    const int32_t row = size_.remainder(tile * kKeys);
#pragma unroll 1
    for (int32_t begin = 0; begin < rows; begin += kTailBoxRows) {
      const int32_t page = size_.quotient(begin);  // 0 where pages are larger than a tile
      const uint32_t index = ptx::ld_shared_b32(shared_ + static_cast<uint32_t>(page * 4));
      copy_end(begin, row + begin - page * box_rows_, static_cast<int32_t>(index));
    }
  }
  TILEWISE_DEVICE int32_t first_tile_rows(int32_t tile) const {
    return box_rows_ <= kSmallPage ? kKeys : min(kKeys, tail_box_rows(keys_ - tile * kKeys));
  }

  // Whether all pages that this lane has looked up lie inside the tensors.
  TILEWISE_DEVICE bool fit() const { return highest_ <= last_page_; }

  TILEWISE_DEVICE void advance(int32_t tile) {
    ptx::sync_warp();
    store_pages(next_pages_);
    next_pages_ = look_up(tile - 2 * C::kWarpSplits);
  }

 private:
  // Entries without a valid key of the tile are not looked up.
  TILEWISE_DEVICE uint32_t look_up(int32_t tile) {
    const int32_t row_in_tile = ptx::lane_index() * box_rows_;
    const int32_t row = tile * kKeys + row_in_tile;
    if (tile < first_ || row_in_tile >= kKeys || row >= keys_)
      return static_cast<uint32_t>(kOutOfBounds);
    const uint32_t page = ptx::ld_global_b32(table_ + size_.quotient(row));
    highest_ = max(highest_, page);
    return min(page, last_page_);
  }

  TILEWISE_DEVICE void store_pages(uint32_t pages) const {
    const auto lane = static_cast<uint32_t>(ptx::lane_index());
    if (lane < kMaxBoxes) ptx::st_shared_b32(shared_ + lane * 4, pages);
    ptx::sync_warp();
  }

  Divisor size_;  // rows per page
  int32_t box_rows_;
  ptx::SharedAddress shared_;
  const int32_t* table_;
  uint32_t last_page_;
  uint32_t highest_ = 0;  // highest entry looked up
  int32_t keys_;
  int32_t first_;        // the first tile to load
  uint32_t next_pages_;  // of the tile after the next one to load
};

}  // namespace tilewise::cuda::mma_sync
