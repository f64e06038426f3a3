// How a problem is divided: tiles of packed query rows, splits and chunks of keys.
#pragma once

#include "attention/band.h"
#include "base/divisor.h"
#include "base/math.h"

namespace tilewise {

// GQA packing: the query heads that share a key/value head are packed into one tile, row by row.
// Packed row r is row r / group of query head r % group. Neighbouring packed rows see nearly the
// same keys, so GQA costs no more edge tiles than MHA, and decoding fills a tile with heads.
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

// [0, length) cut into tiles of `step`, the last one shorter.
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

// Split-KV whose number of splits depends on the lengths of each sequence alone, not on the rest of
// the batch.
struct SplitRule {
  int64_t min_keys = 0;          // per split; 0: every sequence has `max_splits` splits
  int64_t max_splits = 1;        // per sequence
  int64_t max_rows = INT64_MAX;  // a sequence with more rows than this is not split

  TILEWISE_FN constexpr int64_t splits(int64_t sequence_rows, int64_t keys) const {
    if (min_keys == 0) return max_splits;
    if (sequence_rows > max_rows) return 1;
    // 32 bits: a 64-bit division is slow on a GPU.
    const auto some = static_cast<uint32_t>(min<int64_t>(keys, INT32_MAX));
    return clamp(some / static_cast<uint32_t>(min_keys), 1, max_splits);
  }
};

// Split-KV for a varlen batch: the keys of the whole batch are cut into chunks of one size, in
// whole tiles, so that every CTA reads about the same number of keys. Sequences of uniform lengths
// all have the same number of chunks. A batch may hold at most 2^30 keys.
struct ChunkSchedule {
  int32_t max_chunks = 0;         // per batch, at least one per sequence; 0: no chunks
  Divisor chunks_if_uniform = 1;  // per sequence, when lengths are uniform
  Divisor tile = 1;               // keys per tile
  // Lengths of at most kShort tiles count as uniform when the longest is at most this many quarters
  // of the mean.
  int32_t max_imbalance_quarters = kDefaultImbalanceQuarters;
  // If not 0, the CTAs of long sequences start first, and no chunk is longer than the keys of the
  // batch divided by this number of sequences, which run at the same time.
  Divisor concurrent_sequences = 0;

  struct Batch {
    int32_t sequences;
    int32_t keys;
    int32_t longest;

    // Whether the longest sequence has at most `quarters` / 4 times the mean length.
    TILEWISE_FN constexpr bool imbalance_within(int32_t quarters) const {
      return int64_t{longest} * sequences * 4 <= int64_t{keys} * quarters;
    }
  };

  static constexpr int32_t kDefaultImbalanceQuarters = 5;  // default of `max_imbalance_quarters`
  static constexpr int32_t kShort = 32;                    // tiles

  TILEWISE_FN constexpr bool are_uniform(const Batch& batch) const {
    return batch.imbalance_within(batch.longest <= kShort * tile ? max_imbalance_quarters
                                                                 : kDefaultImbalanceQuarters);
  }

  TILEWISE_FN constexpr bool any() const { return max_chunks != 0; }
  TILEWISE_FN constexpr bool longest_first() const { return concurrent_sequences != 0; }

  // The first chunk size, in keys, of a search: the search ends at the first size with which the
  // batch has no more than `max_chunks` chunks.
  TILEWISE_FN constexpr int32_t first_chunk_size(const Batch& batch) const {
    if (are_uniform(batch)) {
      const int32_t size = quotient(batch.longest, chunks_if_uniform);
      return whole_tiles(longest_first() ? min(size, quotient(batch.keys, concurrent_sequences))
                                         : size);
    }
    // The last chunk of a sequence is short: on average, half of it is missing.
    return whole_tiles(quotient(batch.keys, max_chunks - batch.sequences / 2));
  }
  // The chunk size to try after `size`, which resulted in `chunks` chunks.
  TILEWISE_FN constexpr int32_t next_chunk_size(const Batch& batch, int attempt, int32_t size,
                                                int32_t chunks) const {
    constexpr int kAttempts = 3;
    if (attempt + 1 < kAttempts) {
      const float longer = static_cast<float>(size) * static_cast<float>(chunks);
      return max(size + tile,
                 whole_tiles(static_cast<int32_t>(longer / static_cast<float>(max_chunks))));
    }
    return whole_tiles(max_chunks > batch.sequences
                           ? quotient(batch.keys, max_chunks - batch.sequences)
                           : batch.longest);
  }

  // Chunks of a sequence: at least 1, because a CTA has to write the rows of an empty sequence.
  TILEWISE_FN static constexpr int32_t count(int32_t keys, int32_t chunk_size) {
    return quotient(max(1, keys), chunk_size);
  }

 private:
  // Rounded up. 32 bits: a 64-bit division is slow on a GPU.
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

// Split `index` of `keys`. Splits consist of whole tiles and are as equal as possible; the last
// ones may be empty.
TILEWISE_FN constexpr Range key_split(Range keys, int64_t splits, int64_t index, int64_t tile) {
  const int64_t step = round_up(ceil_div(keys.size(), splits), tile);
  return {min(keys.end, keys.begin + index * step), min(keys.end, keys.begin + (index + 1) * step)};
}

}  // namespace tilewise
