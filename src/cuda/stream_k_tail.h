// The tiles of a last, partial wave, shared by all CTAs (Stream-K).
#pragma once

#include "base/divisor.h"
#include "base/math.h"

namespace tilewise::cuda {

// The tiles of a last wave that would leave CTAs idle form one line of key tiles, and every CTA
// takes an equal share of it (Stream-K: Osama et al., PPoPP 2023). A share is no longer than the
// key tiles of one tile, so it touches two tiles at most. A combine kernel merges the partial
// results of a tile.
struct StreamKTail {
  int32_t tiles = 0;              // 0: there is no such tail
  int32_t first = 0;              // index of the first of these tiles in the order
  Divisor key_tiles = 1;          // per tile
  Divisor key_tiles_per_cta = 1;  // length of a share
  int32_t columns = 0;            // of a partial result: those of the head-dim tile

  // Per tile; one lane of a warp weighs each when they are combined.
  static constexpr int32_t kMaxShares = 32;

  // What a CTA computes of one tile: key tiles [begin, end).
  struct Share {
    int32_t tile;  // counted from the first tile of the tail
    int32_t begin;
    int32_t end;

    TILEWISE_FN constexpr bool empty() const { return end <= begin; }
  };

  TILEWISE_FN constexpr bool any() const { return tiles != 0; }

  // Share `number`, 0 or 1, of a CTA: its key tiles of the first and of the second tile it touches.
  TILEWISE_FN constexpr Share share(int32_t block, int32_t number) const {
    const int32_t begin = block * key_tiles_per_cta;
    const int32_t end = min(begin + key_tiles_per_cta, tiles * key_tiles);
    const int32_t tile = key_tiles.quotient(begin) + number;
    const int32_t start = tile * key_tiles;
    return {tile, max(begin, start) - start, min(end, start + key_tiles) - start};
  }

  TILEWISE_FN constexpr int32_t first_block(int32_t tile) const {
    return key_tiles_per_cta.quotient(tile * key_tiles);
  }
  TILEWISE_FN constexpr int32_t shares_of(int32_t tile) const {
    return key_tiles_per_cta.quotient((tile + 1) * key_tiles - 1) - first_block(tile) + 1;
  }

  // Index of a partial result. From one share to the next either the CTA or the tile changes, so
  // the results of a tile are contiguous.
  TILEWISE_FN constexpr static int32_t result_index(int32_t block, int32_t tile) {
    return block + tile;
  }
  TILEWISE_FN constexpr int32_t num_results() const {
    const int32_t last = tiles - 1;
    return any() ? result_index(first_block(last) + shares_of(last) - 1, last) + 1 : 0;
  }
};

}  // namespace tilewise::cuda
