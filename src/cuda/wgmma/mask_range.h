// The ranges of a mask as a tile of rows sees them, in 32 bits. In the backward, where a tile of
// keys is seen by rows, rows and keys change places here.
#pragma once

#include "attention/mask.h"
#include "cuda/common/query_tile.h"

namespace tilewise::cuda::wgmma {

struct KeyRun {
  int32_t begin;
  int32_t end;

  // The bits of those among the 32 keys of word `w` of a tile whose first key is `key`.
  TILEWISE_DEVICE uint32_t bits(int32_t key, int w) const {
    const int32_t first = key + w * static_cast<int32_t>(kMaskWord);
    return below(end - first) & ~below(begin - first);
  }

 private:
  TILEWISE_DEVICE static uint32_t below(int32_t key) {
    return key >= 32 ? ~0u : (1u << max(key, 0)) - 1;
  }
};

// Rows are counted from the first one of the tile, keys from that of the sequence. Row r of the
// range sees the keys [max(begin, lower + r), min(end, upper + r)). By default there is no row.
struct NearRange {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t begin = 0;
  int32_t end = 0;
  int32_t lower = 0;
  int32_t upper = 0;

  TILEWISE_DEVICE static NearRange of(const MaskRange& range, int64_t first_row) {
    const int64_t diagonal = range.keys.begin + first_row - range.rows.begin + range.band.shift();
    return {.row_begin = position(range.rows.begin - first_row),
            .row_end = position(range.rows.end - first_row),
            .begin = position(range.keys.begin),
            .end = position(range.keys.end),
            .lower = position(diagonal - range.band.left),
            .upper = position(diagonal + range.band.right + 1)};
  }

  // The range of another lane. A whole warp calls it.
  TILEWISE_DEVICE NearRange of_lane(int lane) const {
    const auto from = [&](int32_t x) {
      return static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(x), lane));
    };
    return {from(row_begin), from(row_end), from(begin), from(end), from(lower), from(upper)};
  }

  TILEWISE_DEVICE KeyRun keys_of(int32_t r) const {
    if (r < row_begin || r >= row_end) return {0, 0};
    return {max(begin, lower + r), min(end, upper + r)};
  }

  // The hull of those of the keys that one of the first `rows` rows sees.
  TILEWISE_DEVICE KeyRun keys_of_any(int32_t rows, const KeyRun& keys) const {
    const int32_t first = max(0, row_begin);
    const int32_t last = min(rows, row_end) - 1;
    if (first > last) return {0, 0};
    return {max(keys.begin, max(begin, lower + first)), min(keys.end, min(end, upper + last))};
  }
  TILEWISE_DEVICE bool shows_all(int32_t rows, const KeyRun& keys) const {
    return row_begin <= 0 && rows <= row_end && max(begin, lower + rows - 1) <= keys.begin &&
           keys.end <= min(end, upper);
  }
};

// The ranges of a mask in the registers of a mask warp: each lane holds one of every 32. `Reader`,
// which derives from it, has
//
//   mask()         the mask
//   near(range)    the range as the rows of the work tile see it
//   rows()         the number of these rows
template <class Reader>
class NearRanges {
 protected:
  // The first 32 ranges stay in registers.
  TILEWISE_DEVICE void load_ranges() { near_ = load(0); }

  // Calls visit(range of the lane) for every 32 ranges.
  template <class Visit>
  TILEWISE_DEVICE void for_chunks(const Visit& visit) const {
    visit(near_);
#pragma unroll 1
    for (int64_t first = ptx::kWarpSize; first < reader().mask().range_count();
         first += ptx::kWarpSize)
      visit(load(first));
  }

  // The coverage of the lane's keys, which lie in `window`, the same in all lanes.
  TILEWISE_DEVICE Coverage coverage_by_ranges(const KeyRun& keys, const KeyRun& window) const {
    bool some = false;
    bool all = false;
    for_ranges(window, [&](const NearRange& range) {
      const KeyRun seen = range.keys_of_any(reader().rows(), keys);
      some = some || seen.begin < seen.end;
      all = all || range.shows_all(reader().rows(), keys);
    });
    return all ? Coverage::full : some ? Coverage::partial : Coverage::none;
  }

  // Adds the bits of the keys from `key` on that the lane's rows see: row_of(i) for words[i].
  template <int kRows, int kWords, class RowOf>
  TILEWISE_DEVICE void add_bits_of_ranges(uint32_t (&words)[kRows][kWords], int32_t key,
                                          const RowOf& row_of) const {
    for_ranges({key, key + kWords * static_cast<int32_t>(kMaskWord)}, [&](const NearRange& range) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const KeyRun run = range.keys_of(row_of(i));
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] |= run.bits(key, w);
      }
    });
  }

 private:
  TILEWISE_DEVICE const Reader& reader() const { return static_cast<const Reader&>(*this); }

  TILEWISE_DEVICE NearRange load(int64_t first) const {
    const Mask& mask = reader().mask();
    const int64_t i = first + ptx::lane_index();
    if (i >= mask.range_count()) return {};
    const int64_t at = mask.entry_of_range(i) * MaskRange::kFields;
    return reader().near(MaskRange::of(mask.mask->entries + at));
  }

  // Calls visit(range), in all lanes, for the ranges that show some of the keys.
  template <class Visit>
  TILEWISE_DEVICE void for_ranges(const KeyRun& keys, const Visit& visit) const {
    for_chunks([&](const NearRange& own) {
      const KeyRun seen = own.keys_of_any(reader().rows(), keys);
#pragma unroll 1
      for (uint32_t left = ptx::ballot(seen.begin < seen.end); left != 0; left &= left - 1)
        visit(own.of_lane(ptx::bit_width(left & (~left + 1)) - 1));
    });
  }

  NearRange near_;
};

}  // namespace tilewise::cuda::wgmma
