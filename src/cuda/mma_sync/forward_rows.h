// What one block of the forward has to do: which packed query rows, and which tiles of keys.
#pragma once

#include "attention/schedule.h"
#include "cuda/params.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::mma_sync {

// Positions inside a sequence are 32-bit, with room for a tile on either side.
inline constexpr int64_t kMargin = 4096;

TILEWISE_DEVICE int32_t position(int64_t x) {
  return static_cast<int32_t>(clamp(x, -kMargin, INT32_MAX - kMargin));
}

// group_size, without the division of 64-bit numbers.
TILEWISE_DEVICE int32_t heads_per_key(const Problem& p) {
  return static_cast<int32_t>(p.heads_q) / static_cast<int32_t>(p.heads_kv);
}

// What is the same in all lanes, said to the compiler: it then counts and compares such numbers
// once per warp and not in every lane's registers.
TILEWISE_DEVICE int32_t uniform(int32_t x) {
  return static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(x), 0));
}

// The packed rows of a tile, counted from its first one. Row r is row `first + row(r)` of the
// sequence and query head `first_head + head(r)`.
struct QueryRows {
  int64_t first;
  int32_t first_head;
  int32_t group;
  int32_t offset;       // of packed row 0 among the heads of its row
  uint32_t reciprocal;  // ceil(2^31 / group)
  int32_t count;        // 0: nothing to do

  TILEWISE_DEVICE static QueryRows of(const ForwardParams& p, const Band& band, int64_t tile,
                                      int32_t head) {
    const int64_t begin = tile * p.row_tile;
    const int64_t left = p.packing.packed(band.rows) - begin;
    QueryRows r;
    r.group = static_cast<int32_t>(p.packing.group);
    r.first = r.group == 1 ? begin : p.packing.row(begin);  // few pay for a 64-bit division
    r.first_head = head * r.group;
    r.offset = static_cast<int32_t>(begin - p.packing.packed(r.first));
    r.reciprocal = (0x7fffffffu + static_cast<uint32_t>(r.group)) / static_cast<uint32_t>(r.group);
    r.count = static_cast<int32_t>(clamp(left, 0, p.row_tile));
    return r;
  }

  // The quotient (offset + r) / group, exact for groups below 2^15.
  TILEWISE_DEVICE int32_t row(int32_t r) const {
    return static_cast<int32_t>(ptx::mul_high(static_cast<uint32_t>(offset + r) * 2, reciprocal));
  }
  TILEWISE_DEVICE int32_t head(int32_t r) const { return offset + r - row(r) * group; }
  TILEWISE_DEVICE Range range() const { return {first, first + row(count - 1) + 1}; }
};

// The key tiles that the rows of a block see, walked from the last to the first.
struct KeyTiles {
  int32_t first;
  int32_t last;  // below `first`: none
  int32_t full_begin;
  int32_t full_end;  // tiles in [full_begin, full_end) are seen by all rows in full
  // Row r sees the keys [lower + row(r), min(keys, upper + row(r))).
  int32_t keys;
  int32_t lower;
  int32_t upper;

  TILEWISE_DEVICE static KeyTiles of(const ForwardParams& p, const Band& band,
                                     const QueryRows& rows, int32_t split, int32_t step) {
    const Range range = rows.range();
    const Range any = band.keys_of_any(range);
    const Range all = band.keys_of_all(range);
    const Range whole = {any.begin / step * step, any.end};
    const Range part = p.order.splits == 1 ? whole : key_split(whole, p.order.splits, split, step);
    const int64_t row0 = rows.first + band.shift();
    KeyTiles t;
    t.first = static_cast<int32_t>(part.begin / step);
    t.last = part.empty() ? t.first - 1 : static_cast<int32_t>((part.end - 1) / step);
    t.full_begin = max(t.first, static_cast<int32_t>(ceil_div(all.begin, step)));
    t.full_end = static_cast<int32_t>(max(int64_t{0}, all.end) / step);
    t.keys = position(band.keys);
    t.lower = position(row0 - band.left);
    t.upper = position(row0 + band.right + 1);
    return t;
  }

  TILEWISE_DEVICE bool masked(int32_t tile) const { return tile < full_begin || tile >= full_end; }
};

// All of it.
struct BlockWork {
  Sequence sequence;
  QueryRows rows;
  KeyTiles tiles;
  int32_t split;

  TILEWISE_DEVICE bool any() const { return rows.count > 0; }
  TILEWISE_DEVICE int32_t head(int32_t r) const { return rows.first_head + rows.head(r); }
  // Offset of packed row r in q or out.
  TILEWISE_DEVICE int64_t offset(const tilewise_tensor& view, int32_t r) const {
    return sequence.row_offset(view, rows.first + rows.row(r)) + head(r) * view.stride_head;
  }

  TILEWISE_DEVICE static BlockWork of(const ForwardParams& p, int64_t block, int32_t key_tile) {
    const TileOrder::Work work = p.order.at(block);
    BlockWork w;
    w.rows.count = 0;
    if (work.sequence < 0) return w;
    w.sequence = sequence_of(p.problem, work.sequence);
    w.rows = QueryRows::of(p, w.sequence.band, work.tile, work.head);
    w.split = work.split;
    if (w.any()) w.tiles = KeyTiles::of(p, w.sequence.band, w.rows, work.split, key_tile);
    return w;
  }
};

}  // namespace tilewise::cuda::mma_sync
