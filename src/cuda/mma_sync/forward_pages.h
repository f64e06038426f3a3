// Paged keys and values of the paged form. The block table is read a tile ahead, so that no copy
// waits for its address.
#pragma once

#include "cuda/mma_sync/forward_rows.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

template <int kSectorsPerLane>
inline constexpr int kPrefetchBytes = kSectorsPerLane * ptx::kWarpSize * 4;

// Prefetches the first 256 * kSectorsPerLane block-table entries of a sequence to L1 while its
// length is being loaded, since a look-up after that would cost a second wait for L2. A sector has
// 8 entries. The copies, kPrefetchBytes at `shared`, are never read.
template <int kSectorsPerLane>
TILEWISE_DEVICE void prefetch_pages(const Problem& p, int32_t sequence, ptx::SharedAddress shared) {
  constexpr int kEntriesPerSector = 8;
  const int32_t* const first = p.block_table + sequence * p.block_table_stride;
#pragma unroll
  for (int i = 0; i < kSectorsPerLane; ++i) {
    const int sector = i * ptx::kWarpSize + ptx::lane_index();
    const int entry = sector * kEntriesPerSector;
    if (entry < p.block_table_width)
      ptx::cp_async_4(shared + static_cast<uint32_t>(sector * 4), first + entry, 4);
  }
}

// The page and the row in it of each row of a tile, which K and V share. Several lanes copy one row
// in a pass, and divide the look-ups of all passes: lane i of them looks up the row of pass i.
template <class C, class Lanes>
class PageRows {
 public:
  static constexpr int kLanesPerRow = Lanes::kStride;
  static_assert(kLanesPerRow <= ptx::kWarpSize);
  static constexpr int kLookUps = static_cast<int>(ceil_div(Lanes::kPasses, kLanesPerRow));
  // Otherwise some lanes have no row to look up.
  static constexpr bool kLanesAreFull = Lanes::kPasses % kLanesPerRow == 0;

  // Tile `last` is the first one to be loaded.
  TILEWISE_DEVICE PageRows(const ForwardParams& p, const QueryTile& q_tile, int32_t last)
      : size_(p.page_size), first_(ptx::uniform(q_tile.tiles.first)) {
    look_up(q_tile, last);
  }

  TILEWISE_DEVICE bool has_tile(int32_t tile) const { return tile >= first_; }

  // Called before the keys of `tile` are loaded: gives its rows to the copies of K and V, and looks
  // up those of the next tile.
  template <class... TileCopies>
  TILEWISE_DEVICE void advance(const QueryTile& q_tile, int32_t tile, TileCopies&... copies) {
    (copies.set_rows(*this), ...);
    look_up(q_tile, tile - C::kWarpSplits);
  }

  // Whether all pages that this lane has looked up lie inside the tensors.
  TILEWISE_DEVICE bool fit(const QueryTile& q_tile) const {
    return highest_ <= q_tile.sequence.kv.last_page;
  }

  // The page of this lane's row in look-up `i`.
  TILEWISE_DEVICE int32_t page(int i) const { return pages_[i]; }
  TILEWISE_DEVICE int32_t row_in_page(int i) const { return rows_[i]; }

 private:
  TILEWISE_DEVICE void look_up(const QueryTile& q_tile, int32_t tile) {
    const KvSource& kv = q_tile.sequence.kv;
    const Lanes lanes(opaque_thread<C>());
    // Rows of the sequence, including left padding.
    const int32_t first = static_cast<int32_t>(kv.first) + tile * C::kForward.keys;
    const int32_t end = static_cast<int32_t>(kv.first) + q_tile.tiles.keys;
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int row_in_tile = lanes.row_of(lanes.chunk + i * kLanesPerRow);
      const int32_t row = first + row_in_tile;
      rows_[i] = size_.remainder(row);
      pages_[i] = 0;
      if (has_tile(tile) && row < end && (kLanesAreFull || row_in_tile < C::kForward.keys)) {
        const auto page = static_cast<uint32_t>(kv.pages[size_.quotient(row)]);
        pages_[i] = static_cast<int32_t>(min(page, kv.last_page));
        highest_ = max(highest_, page);
      }
    }
  }

  Divisor size_;          // rows per page
  int32_t first_;         // the first tile to load
  uint32_t highest_ = 0;  // highest entry looked up
  int32_t pages_[kLookUps];
  int32_t rows_[kLookUps];
};

// Copies the tiles of K or V from the last to the first, as `KvTileCopy` does. Lanes exchange one
// 32-bit number per row: its offset from row 0 of page 0 in units of 16 bytes.
template <class C, class Lanes>
class PagedTileCopy {
 public:
  using Element = typename C::Element;
  using Rows = PageRows<C, Lanes>;
  static constexpr int kParts = Lanes::kPasses < 2 ? 1 : 2;
  static constexpr int kPartPasses = (Lanes::kPasses + kParts - 1) / kParts;

  TILEWISE_DEVICE PagedTileCopy(const ForwardParams& p, const tilewise_tensor& view,
                                int64_t columns, const QueryTile& q_tile)
      : page_chunks_(static_cast<int32_t>(view.stride_batch / kPerChunk)),
        row_chunks_(static_cast<int32_t>(view.stride_row / kPerChunk)) {
    const Lanes lanes(row_thread<C>());
    const int64_t head = p.group.quotient(q_tile.rows.first_head) * view.stride_head;
    // Without `opaque` the compiler would take the sum apart and compute it again for each row.
    base_ = ptx::opaque(static_cast<const char*>(view.data) + head * Element::kBytes +
                        lanes.chunk * 16);
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column)
      exists_[column] = lanes.chunk_of(column) * kPerChunk < columns;
  }

  // Takes the rows of the tile that is loaded next.
  TILEWISE_DEVICE void set_rows(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < Rows::kLookUps; ++i) {
      const int32_t chunks = rows.page(i) * page_chunks_ + rows.row_in_page(i) * row_chunks_;
      row_offsets_[i] = static_cast<uint32_t>(chunks);
    }
  }

  // Before the loop: copies the whole tile, of which the first `left` rows exist.
  TILEWISE_DEVICE void copy_whole(ptx::SharedAddress stage, int32_t left) const {
    const Lanes lanes(opaque_thread<C>());
#pragma unroll
    for (int pass = 0; pass < Lanes::kPasses; ++pass)
      copy_row(stage, lanes, pass, lanes.row_of(pass) < left);
  }

  // In the loop: copies part `part` of the tile, or zeros when it is not `wanted`.
  TILEWISE_DEVICE void copy(ptx::SharedAddress stage, bool wanted, int part) const {
    const Lanes lanes(opaque_thread<C>());
#pragma unroll
    for (int i = 0; i < Lanes::kPasses; ++i) {
      if (i / kPartPasses == part) copy_row(stage, lanes, i, wanted);
    }
  }

 private:
  static constexpr int kPerChunk = 16 / Element::kBytes;
  static constexpr int kLanesPerRow = Rows::kLanesPerRow;

  TILEWISE_DEVICE void copy_row(ptx::SharedAddress stage, const Lanes& lanes, int pass,
                                bool wanted) const {
    const uint32_t chunks =
        ptx::shuffle_within<kLanesPerRow>(row_offsets_[pass / kLanesPerRow], pass % kLanesPerRow);
    if (!lanes.has(pass)) return;
    const char* const row = base_ + int64_t{static_cast<int32_t>(chunks)} * 16;
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column) {
      tile::copy_chunk<typename C::Arch>(stage + lanes.offset(pass, column),
                                         row + column * Lanes::kStride * 16,
                                         exists_[column] && wanted ? 16 : 0);
    }
  }

  int32_t page_chunks_;
  int32_t row_chunks_;
  const char* base_;              // start of the head, plus this thread's offset in a row
  bool exists_[Lanes::kColumns];  // whether this thread's columns exist
  uint32_t row_offsets_[Rows::kLookUps];
};

}  // namespace tilewise::cuda::mma_sync
