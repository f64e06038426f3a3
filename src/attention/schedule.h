// Work: tiles of packed query rows, chunks of keys, and the order they are taken in.
#pragma once

#include "attention/band.h"
#include "base/divisor.h"
#include "base/math.h"

namespace tilewise {

// The query heads that share a key/value head are packed into one tile, row by row: packed row r is
// row r / group of query head r % group. Neighbouring packed rows see nearly the same keys, so GQA
// costs no more edge tiles than MHA, and decoding fills a tile with heads.
struct Packing {
  int64_t group = 1;

  TILEWISE_FN constexpr int64_t packed(int64_t rows) const { return rows * group; }
  TILEWISE_FN constexpr int64_t row(int64_t packed_row) const { return packed_row / group; }
  TILEWISE_FN constexpr int64_t head(int64_t packed_row) const { return packed_row % group; }
  // Rows that packed rows [begin, end) touch.
  TILEWISE_FN constexpr Range rows(Range packed_rows) const {
    return {packed_rows.begin / group, ceil_div(packed_rows.end, group)};
  }
};

// [0, length) cut into pieces of `step`, the last one shorter.
struct Tiling {
  int64_t length = 0;
  int64_t step = 1;

  TILEWISE_FN constexpr int64_t count() const { return ceil_div(length, step); }
  TILEWISE_FN constexpr Range at(int64_t index) const {
    return {index * step, min(length, (index + 1) * step)};
  }
  // Tiles that touch `range`.
  TILEWISE_FN constexpr Range touching(Range range) const {
    if (range.empty()) return {0, 0};
    return {range.begin / step, min(count(), ceil_div(range.end, step))};
  }
};

// How many parts the keys of a sequence are cut into: what its own lengths say, whatever the batch.
struct SplitRule {
  int64_t least = 0;         // keys of a part, at least; 0: every sequence has `most` parts
  int64_t most = 1;          // parts
  int64_t rows = INT64_MAX;  // a sequence with more rows than these has one part

  TILEWISE_FN constexpr int64_t parts(int64_t sequence_rows, int64_t keys) const {
    if (least == 0) return most;
    if (sequence_rows > rows) return 1;
    // 32 bits: a GPU divides 64 of them slowly.
    const auto some = static_cast<uint32_t>(min<int64_t>(keys, INT32_MAX));
    return clamp(some / static_cast<uint32_t>(least), 1, most);
  }
};

// The same by the lengths of a batch: no part has more than a share of all of its keys, in whole
// tiles. Below 2^31 keys.
struct EqualParts {
  Divisor shares = 0;  // 0: not cut like this
  Divisor tile = 1;    // keys

  TILEWISE_FN constexpr bool any() const { return shares != 0; }
  // Every sequence has one that may be short.
  TILEWISE_FN constexpr int64_t most(int64_t sequences) const { return shares + sequences; }
  TILEWISE_FN constexpr int32_t keys_of_part(int32_t batch_keys) const {
    return ceil_quotient(tile, ceil_quotient(shares, batch_keys)) * tile;
  }
  // Of a sequence, at least 1: somebody has to write the rows of an empty one.
  TILEWISE_FN static constexpr int32_t count(int32_t keys, int32_t keys_of_part) {
    const auto some = static_cast<uint32_t>(max(1, keys));
    const auto part = static_cast<uint32_t>(keys_of_part);
    return static_cast<int32_t>((some + part - 1) / part);
  }

 private:
  // At least 1.
  TILEWISE_FN static constexpr int32_t ceil_quotient(const Divisor& by, int32_t n) {
    return by.quotient(max(1, n) - 1) + 1;
  }
};

// `keys` cut into `splits` parts of whole tiles, as even as possible; trailing parts may be empty.
TILEWISE_FN constexpr Range key_split(Range keys, int64_t splits, int64_t index, int64_t tile) {
  const int64_t step = round_up(ceil_div(keys.size(), splits), tile);
  return {min(keys.end, keys.begin + index * step), min(keys.end, keys.begin + (index + 1) * step)};
}

}  // namespace tilewise
