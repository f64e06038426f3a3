// A mask, as the loops use it: what it allows the panels of a work item, and the bits of partial
// tiles in vectors.
#pragma once

#include "attention/mask.h"
#include "attention/schedule.h"
#include "cpu/generic/lanes.h"

namespace tilewise::cpu {
namespace {

// Query heads that share a key/value head.
TILEWISE_FN Range query_heads(const Problem& p, int64_t kv_head) {
  return {kv_head * group_size(p), (kv_head + 1) * group_size(p)};
}

// Without a mask, every panel sees all of every tile.
struct LaneMask : MaskScratch {
  Mask mask = {};
  Range heads = {};

  TILEWISE_FN bool on() const { return mask.mask != nullptr; }

  // Reads the mask of the sequence, as far as it concerns these rows and keys of the query heads
  // of one or more key/value heads.
  TILEWISE_FN void begin(const Problem& p, const Sequence& s, int64_t kv_head, Range rows,
                         Range keys, int64_t kv_heads = 1) {
    if (p.mask == nullptr) return;
    mask = Mask::of(p.mask, s.batch).narrowed(rows, keys, ranges);
    heads = {query_heads(p, kv_head).begin, query_heads(p, kv_head + kv_heads - 1).end};
  }

  TILEWISE_FN Coverage of_panel(const Lanes& lanes, int64_t index, int64_t panel,
                                Range keys) const {
    if (!on()) return Coverage::full;
    const int64_t last = min((index + 1) * panel, lanes.count) - 1;
    return mask.coverage(heads, {lanes.row[index * panel], lanes.row[last] + 1}, keys);
  }

  // The tiles of `tiling` that touch `seen`, a hull of the keys that the band shows the rows.
  TILEWISE_FN TileWalk walk(const Lanes& lanes, int64_t panel, Tiling tiling, Range seen) const {
    if (!on()) return {tiling.touching(seen)};
    const Range rows = {lanes.row[0], lanes.row[lanes.count - 1] + 1};
    const TileWalk walk = {tiling.touching(intersect(seen, mask.keys_of_any(heads, rows))),
                           coverage, ceil_div(lanes.count, panel)};
    uint8_t* to = coverage;
    for (int64_t j = walk.tiles.begin; j < walk.tiles.end; ++j)
      for (int64_t i = 0; i < walk.panels; ++i)
        *to++ = static_cast<uint8_t>(of_panel(lanes, i, panel, tiling.at(j)));
    return walk;
  }

  // Reads the bits of the keys of a tile for the `panel` lanes from lane `first` of `lanes` on,
  // into the lanes of `bits` from `at` on.
  TILEWISE_FN void load(const Lanes& lanes, int64_t first, int64_t panel, Range keys, int64_t at) {
    const int64_t words = ceil_div(keys.size(), kMaskWord);
    for (int64_t i = 0; i < panel; ++i) {
      const int64_t lane = first + i;
      const bool repeats = i > 0 && lanes.row[lane] == lanes.row[lane - 1] &&
                           (!mask.per_head() || lanes.head[lane] == lanes.head[lane - 1]);
      uint32_t* const to = bits + at + i;
      if (!repeats) load_row(lanes.head[lane], lanes.row[lane], keys, to);
      for (int64_t w = 0; repeats && w < words; ++w) to[w * ld] = to[w * ld - 1];
    }
  }
  // Reads those of one row of one head into a lane.
  TILEWISE_FN void load_row(int64_t head, int64_t row, Range keys, uint32_t* lane) const {
    for (int64_t w = 0; w < ceil_div(keys.size(), kMaskWord); ++w) lane[w * ld] = 0;
    mask.add_bits(head, row, MaskBits{lane, ld, keys});
  }

  // Whether W lanes of `bits` from `lane` on see a key of the tile.
  TILEWISE_FN I sees(int64_t key, int64_t lane) const {
    const U word = load_as<U>(bits + key / kMaskWord * ld + lane);
    return (word & (1u << (key % kMaskWord))) != 0u;
  }

  // Whether the first lane of `bits` sees W keys of the tile from `key` on, a multiple of W.
  TILEWISE_FN I sees_keys(int64_t key) const {
    const U word = U{} + (bits[key / kMaskWord * ld] >> (key % kMaskWord));
    return (word >> reinterpret_cast<U>(lane_numbers()) & 1u) != 0u;
  }

  // Removes what these lanes do not see from scores [key][lane] of a strip of the tile.
  TILEWISE_FN void hide(float* scores, int64_t stride, Range strip, Range keys,
                        int64_t lanes) const {
    for (int64_t key = strip.begin; key < min(strip.end, keys.size()); ++key) {
      float* const row = scores + (key - strip.begin) * stride;
      for (int64_t lane = 0; lane < lanes; lane += W)
        store(row + lane,
              sees(key, lane) ? tilewise::cpu::load(row + lane) : splat(kMinusInfinity));
    }
  }
};

}  // namespace
}  // namespace tilewise::cpu
