// Stream-K: all CTAs share the tiles of a partial last wave.
#pragma once

#include "base/divisor.h"
#include "base/math.h"

namespace tilewise::cuda {

// The tiles of a last wave that would leave CTAs idle are laid end to end as one sequence of key
// tiles, of which every CTA takes an equal share (Stream-K: Osama et al., PPoPP 2023, arXiv
// 2301.03598). A share has at most as many key tiles as one tile, so it touches at most two tiles.
// A combine kernel merges the partial results of each tile.
struct StreamKTail {
  int32_t tiles = 0;              // 0: no tail
  int32_t first = 0;              // index of the tail's first tile in the order
  Divisor key_tiles = 1;          // per tile
  Divisor key_tiles_per_cta = 1;  // length of a share
  int32_t columns = 0;            // of a partial result: the kernel's head_dim_v

  // Maximum number of shares per tile: when they are combined, each lane of a warp weights one.
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

  // Index of a partial result. From one share to the next either the CTA or the tile advances by
  // one, so all indices are used and the results of a tile are contiguous.
  TILEWISE_FN constexpr static int32_t result_index(int32_t block, int32_t tile) {
    return block + tile;
  }
  TILEWISE_FN constexpr int32_t num_results() const {
    const int32_t last = tiles - 1;
    return any() ? result_index(first_block(last) + shares_of(last) - 1, last) + 1 : 0;
  }
};

}  // namespace tilewise::cuda
