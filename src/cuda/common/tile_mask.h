// A mask as the threads of a CTA use it together: in shared memory, one tile of 64 rows and 64 keys
// at a time. The walk over tiles skips those of which the mask shows nothing; the bits of a tile
// that it shows in part say what each row sees.
//
// Unless a function says otherwise, all threads of the CTA call it. What reads the mask is not
// inlined: it would double the code of the kernels, and problems without a mask do not call it.
#pragma once

#include "attention/mask.h"
#include "attention/schedule.h"
#include "cuda/common/listed_ranges.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

struct TileMask {
  static constexpr int kTile = 64;     // rows and keys of a tile
  static constexpr int kWindow = 256;  // tiles whose coverage is known at a time, one per thread

  tilewise_mask given;  // of the kernel parameters
  Mask of_sequence;     // all its ranges
  Mask near;            // those that touch the rows and keys of a walk
  ListedRanges<128> listed;

  Range tiles;      // of the walk
  TileWalk window;  // the next of them
  uint8_t coverage[kWindow];

  // What the rows see of the current tile: everything, unless it is partial.
  bool partial;
  uint32_t bits[kTile / kMaskWord][kTile];  // [word of a row][row]

  TILEWISE_DEVICE bool on() const { return given.kind != 0; }

  // Reads the mask of a sequence. One thread calls it.
  TILEWISE_DEVICE void begin(const tilewise_mask& mask, int64_t batch) {
    given = mask;
    partial = false;
    if (on()) of_sequence = Mask::of(&given, batch);
  }

  // Lists the ranges that touch the rows and keys: a tile touches few of those of a long sequence.
  // One whole warp calls it.
  TILEWISE_COLD void list(Range rows, Range keys) {
    const Mask found = listed.list(of_sequence, rows, keys);
    if (ptx::lane_index() == 0) near = found;
  }

  TILEWISE_COLD Coverage coverage_of(Range heads, Range rows, Range keys) const {
    return near.coverage(heads, rows, keys);
  }

  // Starts a walk, for which the ranges have been listed. One thread calls it; a barrier follows.
  TILEWISE_DEVICE void begin_walk(Range walked) {
    tiles = walked;
    window = {};
  }

  // The first tile from `tile` on of which the mask shows something, or the end of the walk.
  // of_tile(tile) is the coverage of a tile.
  template <class OfTile>
  TILEWISE_DEVICE int64_t next(int64_t tile, const OfTile& of_tile) {
    if (!on()) return tile;
    while (tile < tiles.end) {
      if (!window.tiles.contains(tile)) load_window(tile, of_tile);
      tile = window.after(tile - 1);
      if (tile < window.end()) return tile;
    }
    return tile;
  }

  // Reads what the rows see of a tile whose keys begin at `first_key`. row_of(r) and head_of(r) are
  // those of row r of the tile. Barriers must precede and follow the call.
  template <class RowOf, class HeadOf>
  TILEWISE_DEVICE void load_bits(Coverage of_tile, int64_t first_key, const RowOf& row_of,
                                 const HeadOf& head_of) {
    if (!on()) return;
    const int t = ptx::thread_index();
    if (t == 0) partial = of_tile == Coverage::partial;
    if (of_tile != Coverage::partial || t >= kTile * (kTile / kMaskWord)) return;
    const int row = t % kTile;
    const int word = t / kTile;
    const int64_t key = first_key + word * kMaskWord;
    load_word(&bits[word][row], head_of(row), row_of(row), key);
  }

  // Which of the four keys from 4 * group on the row of the tile sees: one bit each.
  TILEWISE_DEVICE uint32_t four_keys(int row, int group) const {
    if (!partial) return 0xfu;
    constexpr int kGroups = kMaskWord / 4;
    return bits[group / kGroups][row] >> (group % kGroups * 4) & 0xfu;
  }

 private:
  TILEWISE_COLD void load_word(uint32_t* to, int64_t head, int64_t row, int64_t key) const {
    *to = 0;
    near.add_bits(head, row, MaskBits{to, 1, {key, key + kMaskWord}});
  }

  template <class OfTile>
  TILEWISE_DEVICE void load_window(int64_t first, const OfTile& of_tile) {
    ptx::sync_block();  // the window before this one has been read
    const int t = ptx::thread_index();
    if (t < kWindow && first + t < tiles.end)
      coverage[t] = static_cast<uint8_t>(of_tile(first + t));
    if (t == 0) window = {{first, min(first + kWindow, tiles.end)}, coverage, 1};
    ptx::sync_block();
  }
};

}  // namespace tilewise::cuda::common
