// The key tiles that a block of query rows visits, in ascending order. `Band` and `Mask` make such
// walks; loops over key tiles take them.
#pragma once

#include "base/math.h"

namespace tilewise {

// How many pairs of a tile of rows and keys are visible. `partial` is always correct: a tile whose
// pairs all turn out to be visible, or hidden, may be called partial.
enum class Coverage : uint8_t { none, partial, full };

// A band alone visits every tile between its first and its last key. A mask leaves tiles out, and
// says for each panel of rows what it allows.
struct TileWalk {
  Range tiles;                        // from the first tile to the last one
  const uint8_t* coverage = nullptr;  // [tile - tiles.begin][panel] of Coverage; null: no mask
  int64_t panels = 0;

  TILEWISE_FN int64_t first() const { return next_visited(tiles.begin); }
  TILEWISE_FN int64_t after(int64_t tile) const { return next_visited(tile + 1); }
  TILEWISE_FN int64_t end() const { return tiles.end; }

  // The coverage of the tile for a panel by the mask alone; the band may hide more.
  TILEWISE_FN Coverage of(int64_t tile, int64_t panel) const {
    if (coverage == nullptr) return Coverage::full;
    return static_cast<Coverage>(coverage[(tile - tiles.begin) * panels + panel]);
  }

 private:
  TILEWISE_FN int64_t next_visited(int64_t tile) const {
    if (coverage == nullptr) return tile;
    for (; tile < tiles.end; ++tile)
      for (int64_t panel = 0; panel < panels; ++panel)
        if (of(tile, panel) != Coverage::none) return tile;
    return tile;
  }
};

}  // namespace tilewise
