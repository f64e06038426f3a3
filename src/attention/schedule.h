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

// The same by the lengths of a batch, in whole tiles. Sequences of lengths that are alike are cut
// as they are where lengths are known, others into parts of a share of all keys. Of batches of at
// most 2^30 keys.
struct EqualParts {
  int32_t most = 0;   // of a batch, at least `alike` for each sequence; 0: not cut like this
  Divisor alike = 1;  // of each sequence of a batch of lengths that are alike
  Divisor tile = 1;   // keys
  // Short ones are alike, too, when the longest is at most so many fourths of the mean.
  int32_t fourths = kFourths;
  // Not 0: blocks of long sequences come first, and of so many sequences as run at once none has
  // more keys than its share of all.
  Divisor at_once = 0;

  struct Batch {
    int32_t sequences;
    int32_t keys;
    int32_t longest;

    // Whether the longest is at most so many fourths of the mean.
    TILEWISE_FN constexpr bool within(int32_t spread) const {
      return int64_t{longest} * sequences * 4 <= int64_t{keys} * spread;
    }
  };

  static constexpr int32_t kFourths = 5;  // of lengths that are alike
  static constexpr int32_t kShort = 32;   // tiles

  TILEWISE_FN constexpr bool are_alike(const Batch& batch) const {
    return batch.within(batch.longest <= kShort * tile ? fourths : kFourths);
  }

  TILEWISE_FN constexpr bool any() const { return most != 0; }
  TILEWISE_FN constexpr bool long_first() const { return at_once != 0; }

  // Keys of a part: the first one of these by which a batch has no more than `most`.
  TILEWISE_FN constexpr int32_t first_part(const Batch& batch) const {
    if (are_alike(batch)) {
      const int32_t part = quotient(batch.longest, alike);
      return whole_tiles(long_first() ? min(part, quotient(batch.keys, at_once)) : part);
    }
    // Every sequence has one part that may be short, of which half is to be expected.
    return whole_tiles(quotient(batch.keys, most - batch.sequences / 2));
  }
  TILEWISE_FN constexpr int32_t next_part(const Batch& batch, int turn, int32_t part,
                                          int32_t parts) const {
    constexpr int kTurns = 3;
    if (turn + 1 < kTurns) {
      const float longer = static_cast<float>(part) * static_cast<float>(parts);
      return max(part + tile, whole_tiles(static_cast<int32_t>(longer / static_cast<float>(most))));
    }
    return whole_tiles(most > batch.sequences ? quotient(batch.keys, most - batch.sequences)
                                              : batch.longest);
  }

  // Of a sequence, at least 1: somebody has to write the rows of an empty one.
  TILEWISE_FN static constexpr int32_t count(int32_t keys, int32_t keys_of_part) {
    return quotient(max(1, keys), keys_of_part);
  }

 private:
  // Rounded up. 32 bits: a GPU divides 64 of them slowly.
  TILEWISE_FN static constexpr int32_t quotient(int32_t n, int32_t by) {
    return static_cast<int32_t>((static_cast<uint32_t>(n) + static_cast<uint32_t>(by) - 1) /
                                static_cast<uint32_t>(by));
  }
  TILEWISE_FN static constexpr int32_t quotient(int32_t n, const Divisor& by) {
    return by.quotient(n + by - 1);
  }
  TILEWISE_FN constexpr int32_t whole_tiles(int32_t keys) const {
    return quotient(max(1, keys), tile) * tile;
  }
};

// `keys` cut into `splits` parts of whole tiles, as even as possible; trailing parts may be empty.
TILEWISE_FN constexpr Range key_split(Range keys, int64_t splits, int64_t index, int64_t tile) {
  const int64_t step = round_up(ceil_div(keys.size(), splits), tile);
  return {min(keys.end, keys.begin + index * step), min(keys.end, keys.begin + (index + 1) * step)};
}

}  // namespace tilewise
