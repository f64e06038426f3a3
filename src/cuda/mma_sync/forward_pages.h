// Keys and values in pages, for the form that has pages and nothing else general. The block table
// is read a tile ahead, so that no copy waits for its address.
#pragma once

#include "cuda/mma_sync/forward_rows.h"
#include "cuda/tile/copy.h"

namespace tilewise::cuda::mma_sync {

// K or V: copies of its tiles, from the last to the first, as `KeyStream` makes them.
//
// The lanes that copy one row of a pass look rows up for each other: lane i of them that of pass i.
// What they hand on is one number of 32 bits: chunks of 16 bytes from row 0 of page 0 on.
template <class C, class Lanes>
class PageStream {
 public:
  using Element = typename C::Element;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kParts = Lanes::kPasses < 2 ? 1 : 2;
  static constexpr int kPartPasses = (Lanes::kPasses + kParts - 1) / kParts;

  TILEWISE_DEVICE PageStream(const ForwardParams& p, const tilewise_tensor& view, int64_t columns,
                             const BlockWork& work)
      : work_(work),
        size_(p.page_size),
        page_chunks_(static_cast<int32_t>(view.stride_batch / kPerChunk)),
        row_chunks_(static_cast<int32_t>(view.stride_row / kPerChunk)),
        first_(uniform(work.tiles.first)) {
    const Lanes lanes(ptx::thread_index());
    const int64_t head = p.group.quotient(work.rows.first_head) * view.stride_head;
    // The compiler would take it apart and add it up again for each row.
    base_ = ptx::recent(static_cast<const char*>(view.data) + head * Element::kBytes +
                        lanes.chunk * 16);
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column)
      exists_[column] = lanes.chunk_of(column) * kPerChunk < columns;
    look_up(work, work.tiles.last);
  }

  // Before the loop: all of the next tile, which is `tile`. The last one may be cut short by the
  // number of keys.
  TILEWISE_DEVICE void copy_whole(ptx::SharedAddress slot, int32_t tile) {
    const int32_t left = tile < first_ ? 0 : work_.tiles.keys - tile * kKeys;
    copy_passes<0, Lanes::kPasses>(work_, slot, tile, [&](int row) { return row < left; });
    look_up(work_, tile - 1);
  }

  // In the loop: part `part` of it; zeros where there is none.
  TILEWISE_DEVICE void copy(ptx::SharedAddress slot, int32_t tile, int part) {
    const BlockWork& work = kept_work<C>();
    const auto wanted = [&](int) { return tile >= first_; };
    if (part == 0) copy_passes<0, kPartPasses>(work, slot, tile, wanted);
    if (part == 1) copy_passes<kPartPasses, Lanes::kPasses>(work, slot, tile, wanted);
    if (part == kParts - 1) look_up(work, tile - 1);
  }

 private:
  static constexpr int kPerChunk = 16 / Element::kBytes;
  static constexpr int kLanesOfRow = Lanes::kStride;
  static constexpr int kLookUps = static_cast<int>(ceil_div(Lanes::kPasses, kLanesOfRow));

  // Of look-up `i` of this lane: a row of its sequence, left padding counted.
  TILEWISE_DEVICE static int32_t row_of(const KvSource& kv, int i, int32_t tile) {
    const Lanes lanes(recent_thread());
    return static_cast<int32_t>(kv.first) + tile * kKeys +
           lanes.row_of(lanes.chunk + i * kLanesOfRow);
  }

  TILEWISE_DEVICE void look_up(const BlockWork& work, int32_t tile) {
    const KvSource& kv = work.sequence.kv;
    const int32_t end = static_cast<int32_t>(kv.first) + work.tiles.keys;
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int32_t row = row_of(kv, i, tile);
      pages_[i] = 0;
      if (tile >= first_ && row < end) pages_[i] = kv.pages[size_.quotient(row)];
    }
  }

  // Passes [kBegin, kEnd) of `tile`; whether row r of it is wanted says `wanted(r)`.
  template <int kBegin, int kEnd, class Wanted>
  TILEWISE_DEVICE void copy_passes(const BlockWork& work, ptx::SharedAddress slot, int32_t tile,
                                   const Wanted& wanted) const {
    const Lanes lanes(recent_thread());
    uint32_t found = 0;
#pragma unroll
    for (int pass = kBegin; pass < kEnd; ++pass) {
      const int i = pass / kLanesOfRow;
      if (pass == kBegin || pass % kLanesOfRow == 0) {
        const int32_t in_page = size_.remainder(row_of(work.sequence.kv, i, tile));
        found = static_cast<uint32_t>(pages_[i] * page_chunks_ + in_page * row_chunks_);
      }
      const uint32_t chunks = ptx::shuffle_within<kLanesOfRow>(found, pass % kLanesOfRow);
      if (!lanes.has(pass)) continue;
      const char* row = base_ + int64_t{static_cast<int32_t>(chunks)} * 16;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        tile::copy_chunk<typename C::Arch>(slot + lanes.offset(pass, column),
                                           row + column * Lanes::kStride * 16,
                                           exists_[column] && wanted(lanes.row_of(pass)) ? 16 : 0);
      }
    }
  }

  const BlockWork& work_;  // before the loop; then `kept_work`
  Divisor size_;           // of a page
  int32_t page_chunks_;
  int32_t row_chunks_;
  int32_t first_;                 // tile that is wanted
  const char* base_;              // of the head, at the chunk of this thread
  bool exists_[Lanes::kColumns];  // the chunks of this thread
  int32_t pages_[kLookUps];       // of the next tile
};

}  // namespace tilewise::cuda::mma_sync
