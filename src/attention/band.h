// The keys that a query row may see: tile ranges and the element predicate, from one definition.
#pragma once

#include "base/math.h"

namespace tilewise {

// Row i of a sequence sees key j when  i + shift - left <= j <= i + shift + right, where shift is
// keys - rows, plus a `diagonal` if the rows or keys are a shard of a longer sequence.
// Equivalently, key j is visible to the rows  j - shift - right <= i <= j - shift + left: a band is
// its own transpose with left and right exchanged. The forward, which iterates over query tiles,
// and the backward, which iterates over key tiles, therefore use the same object. Both bounds grow
// with the row, so the first and the last row of a tile determine the union and the intersection of
// the keys that its rows see. Nothing else in the library knows about causality, windows or
// lengths.
struct Band {
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t left = 0;   // a limit, or kUnlimited
  int64_t right = 0;  // a limit, or kUnlimited
  int64_t diagonal = 0;

  static constexpr int64_t kUnlimited = INT64_MAX / 4;

  TILEWISE_FN static constexpr Band make(int64_t rows, int64_t keys, int64_t left, int64_t right,
                                         int64_t diagonal = 0) {
    return {rows, keys, left < 0 ? kUnlimited : min(left, kUnlimited),
            right < 0 ? kUnlimited : min(right, kUnlimited), diagonal};
  }

  // Row i is aligned with key i + shift(): without `diagonal` the last row with the last key.
  TILEWISE_FN constexpr int64_t shift() const { return keys - rows + diagonal; }

  TILEWISE_FN constexpr bool visible(int64_t row, int64_t key) const {
    return keys_of(row).contains(key);
  }

  TILEWISE_FN constexpr Range keys_of(int64_t row) const {
    return {clamp(row + shift() - left, 0, keys), min(keys, row + shift() + right + 1)};
  }

  TILEWISE_FN constexpr Range rows_of(int64_t key) const { return transposed().keys_of(key); }

  // The hull of the keys that at least one of the rows may see (a superset of their union).
  TILEWISE_FN constexpr Range keys_of_any(Range tile) const {
    return {keys_of(tile.begin).begin, keys_of(tile.end - 1).end};
  }

  // Keys that every one of the rows sees: a tile within this range needs no mask.
  TILEWISE_FN constexpr Range keys_of_all(Range tile) const {
    return {keys_of(tile.end - 1).begin, keys_of(tile.begin).end};
  }

  TILEWISE_FN constexpr Range rows_of_any(Range tile) const {
    return transposed().keys_of_any(tile);
  }

  TILEWISE_FN constexpr Range rows_of_all(Range tile) const {
    return transposed().keys_of_all(tile);
  }

  TILEWISE_FN constexpr bool covers(Range row_tile, Range key_tile) const {
    const Range all = keys_of_all(row_tile);
    return all.begin <= key_tile.begin && key_tile.end <= all.end;
  }

  TILEWISE_FN constexpr Band transposed() const { return {keys, rows, right, left, -diagonal}; }
};

}  // namespace tilewise
