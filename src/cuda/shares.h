// The works of a round that has too few for all blocks, shared by all.
#pragma once

#include "base/divisor.h"
#include "base/math.h"

namespace tilewise::cuda {

// The last works of an order, all of as many key tiles, become one line of tiles, of which every
// block takes a stretch (Stream-K: Osama et al., PPoPP 2023). A stretch is no longer than a work,
// so it has parts of two works at most. A second kernel combines the parts of a work.
struct Shares {
  int32_t works = 0;      // 0: none are shared
  int32_t first = 0;      // index of the first one in the order
  Divisor key_tiles = 1;  // of a work
  Divisor stretch = 1;    // key tiles of a block
  int32_t columns = 0;    // of the results of a part: those of the head-dim tile

  // Of a work; a lane of a warp weighs each.
  static constexpr int32_t kMostParts = 32;

  struct Part {
    int32_t work;  // counted from the first shared one
    int32_t begin;
    int32_t end;  // key tiles

    TILEWISE_FN constexpr bool empty() const { return end <= begin; }
  };

  TILEWISE_FN constexpr bool any() const { return works != 0; }

  // Part `number`, 0 or 1, of the stretch of a block.
  TILEWISE_FN constexpr Part part(int32_t block, int32_t number) const {
    const int32_t begin = block * stretch;
    const int32_t end = min(begin + stretch, works * key_tiles);
    const int32_t work = key_tiles.quotient(begin) + number;
    const int32_t start = work * key_tiles;
    return {work, max(begin, start) - start, min(end, start + key_tiles) - start};
  }

  TILEWISE_FN constexpr int32_t first_block(int32_t work) const {
    return stretch.quotient(work * key_tiles);
  }
  TILEWISE_FN constexpr int32_t parts(int32_t work) const {
    return stretch.quotient((work + 1) * key_tiles - 1) - first_block(work) + 1;
  }

  // Where the results of a part lie. From a part to the next one either the block or the work is
  // another one, so those of a work follow each other.
  TILEWISE_FN constexpr static int32_t slot(int32_t block, int32_t work) { return block + work; }
  TILEWISE_FN constexpr int32_t slots() const {
    const int32_t last = works - 1;
    return any() ? slot(first_block(last) + parts(last) - 1, last) + 1 : 0;
  }
};

}  // namespace tilewise::cuda
