// A range of a mask as a tile of rows sees it, in 32 bits.
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

}  // namespace tilewise::cuda::wgmma
