// The work tile of a CTA of the tensor-core forwards: which packed query rows it computes, and over
// which key tiles.
#pragma once

#include "attention/schedule.h"
#include "cuda/common/batch_chunks.h"
#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// Positions inside a sequence are clamped to 32 bits, with room for a tile on either side.
inline constexpr int64_t kMargin = 4096;

TILEWISE_DEVICE int32_t position(int64_t x) {
  return static_cast<int32_t>(clamp(x, -kMargin, INT32_MAX - kMargin));
}

// Hides from the compiler that x is the same in all lanes, so that it computes with x in each
// lane's registers. Uniform instructions that depend on each other have a longer latency, and they
// need extra moves to predicates and addresses.
TILEWISE_DEVICE int32_t per_lane(int32_t x) {
  constexpr int kMaxThreads = 1024;  // per CTA, so that 0 is added to x
  return x + static_cast<int32_t>(ptx::thread_index()) / kMaxThreads;
}

// The packed rows of a tile (Packing, attention/schedule.h), counted from its first one: packed row
// r is row `first + row(r)` of the sequence in query head `first_head + head(r)`.
struct QueryRows {
  int32_t first;
  int32_t first_head;
  int32_t group;
  int32_t offset;       // head of packed row 0 in its group
  uint32_t reciprocal;  // ceil(2^31 / group)
  int32_t count;        // 0: the CTA has nothing to do

  TILEWISE_DEVICE static QueryRows of(const ForwardParams& p, const Band& band, int32_t tile,
                                      int32_t head) {
    const auto begin = static_cast<int32_t>(tile * p.row_tile);
    QueryRows r;
    r.group = static_cast<int32_t>(p.packing.group);
    r.first = begin;
    r.first_head = head * r.group;
    r.offset = 0;
    r.reciprocal = p.pack_reciprocal;
    if (r.packed()) [[unlikely]] {
      r.first = p.group.quotient(begin);
      r.offset = p.group.remainder(begin);
    }
    r.count = static_cast<int32_t>(clamp(p.packing.packed(band.rows) - begin, 0, p.row_tile));
    return r;
  }

  TILEWISE_DEVICE bool packed() const { return group != 1; }
  // (offset + r) / group, exact for groups below 2^15.
  TILEWISE_DEVICE int32_t row(int32_t r) const {
    return static_cast<int32_t>(ptx::mul_high(static_cast<uint32_t>(offset + r) * 2, reciprocal));
  }
  TILEWISE_DEVICE int32_t head(int32_t r) const { return offset + r - row(r) * group; }
  TILEWISE_DEVICE int32_t last_row() const { return packed() ? row(count - 1) : count - 1; }
};

// The key tiles that the rows of a tile see, walked from the last to the first.
struct KeyTiles {
  int32_t first;
  int32_t last;  // below `first` if the rows see no keys
  int32_t full_begin;
  int32_t full_end;  // every row sees every key of the tiles [full_begin, full_end)
  // Row r sees the keys [lower + row(r), min(keys, upper + row(r))). With a diagonal, `lower` may
  // be as large as `keys`.
  int32_t keys;
  int32_t lower;
  int32_t upper;

  // Sets all members except full_begin and full_end, which the first loads do not need. `step` is
  // the number of keys per tile.
  TILEWISE_DEVICE static KeyTiles of(const Band& band, const QueryRows& rows, int32_t split,
                                     int32_t splits, int32_t step) {
    const int64_t row0 = rows.first + band.shift();
    KeyTiles t;
    t.keys = position(band.keys);
    t.lower = static_cast<int32_t>(clamp(row0 - band.left, -kMargin, t.keys));
    t.upper = position(row0 + band.right + 1);
    int32_t end = max(0, min(t.keys, t.upper + rows.last_row()));
    t.first = t.first_of_all_splits(step);
    if (splits != 1) [[unlikely]] {
      const int32_t stop = max(t.first, tiles(end + step - 1, step));
      const int32_t tiles_per_split = tiles_of_split(stop - t.first, splits);
      if (split > 0) end = max(t.first, stop - tiles_per_split * split) * step;
      t.first = max(t.first, stop - tiles_per_split * (split + 1));
    }
    t.last = end > t.first * step ? tiles(end - 1, step) : t.first - 1;
    return t;
  }

  // The first tile that the rows see, in whichever split it is.
  TILEWISE_DEVICE int32_t first_of_all_splits(int32_t step) const {
    return tiles(max(0, lower), step);
  }

  // Narrows the tiles of the whole sequence to those of its first split.
  TILEWISE_DEVICE void narrow_to_first_split(int32_t splits) {
    first = max(first, last + 1 - tiles_of_split(last + 1 - first, splits));
  }

  // Sets full_begin and full_end.
  TILEWISE_DEVICE void find_full(const QueryRows& rows, int32_t step) {
    full_begin = max(first, tiles(max(0, lower + rows.last_row()) + step - 1, step));
    full_end = tiles(max(0, min(keys, upper)), step);
  }

  TILEWISE_DEVICE bool masked(int32_t tile) const { return tile < full_begin || tile >= full_end; }

 private:
  TILEWISE_DEVICE static int32_t tiles(int32_t keys, int32_t step) {
    return static_cast<int32_t>(static_cast<uint32_t>(keys) / static_cast<uint32_t>(step));
  }

  // The first split has the last tiles, so that its CTA knows where to begin before it knows the
  // number of splits.
  TILEWISE_DEVICE static int32_t tiles_of_split(int32_t all, int32_t splits) {
    return tiles(all + splits - 1, splits);
  }
};

using tilewise::sequence_of;
TILEWISE_DEVICE Sequence sequence_of(const ForwardParams& p, int32_t b) {
  if (p.has_uniform_sequences) [[likely]]
    return uniform_sequence(p.problem, b);
  return tilewise::sequence_of(p.problem, b);
}

// The chunk (its number in the batch, see KeyChunk) and the head of a CTA. The heads of a chunk
// belong to consecutive CTAs, because their keys lie next to each other in memory.
struct HeadChunk {
  int32_t chunk;
  int32_t head;

  // CTAs take the chunks in the order of their numbers. With longest_first the later chunks of
  // sequences precede all first chunks, because only long sequences have later chunks.
  TILEWISE_DEVICE static HeadChunk of_block(const ForwardParams& p) {
    const int32_t chunk_and_head = p.placement.chunk_of(static_cast<int32_t>(ptx::block_index()));
    const int32_t chunk = p.order.heads.quotient(chunk_and_head);
    const int32_t head = chunk_and_head - chunk * p.order.heads;
    if (!p.chunks.longest_first()) return {chunk, head};
    const int32_t others = p.chunks.max_chunks - p.order.sequences;
    return {chunk < others ? p.order.sequences + chunk : chunk - others, head};
  }
};

// The work tile of a CTA.
struct QueryTile {
  Sequence sequence;
  QueryRows rows;
  KeyTiles tiles;
  int32_t split;         // number of the split, or of the chunk, in its sequence
  int32_t splits;        // splits or chunks of the sequence
  HeadChunk head_chunk;  // only with a ChunkSchedule

  TILEWISE_DEVICE bool any() const { return rows.count > 0; }
  TILEWISE_DEVICE int32_t head(int32_t r) const { return rows.first_head + rows.head(r); }
  // Offset of row r in q or out if heads are not packed into the tile.
  TILEWISE_DEVICE int64_t offset_unpacked(const tilewise_tensor& view, int32_t r) const {
    return sequence.row_offset(view, rows.first + r) + rows.first_head * view.stride_head;
  }
  // Offset of packed row r in q or out.
  TILEWISE_DEVICE int64_t offset(const tilewise_tensor& view, int32_t r) const {
    return offset_unpacked(view, 0) + rows.row(r) * view.stride_row +
           rows.head(r) * view.stride_head;
  }

  // `splits`: the number of splits of the sequence, or 0 to compute it from the lengths.
  TILEWISE_DEVICE static QueryTile of(const ForwardParams& p, const TileOrder::WorkTile& tile,
                                      int32_t key_tile, int32_t splits = 0) {
    QueryTile w;
    w.rows.count = 0;
    if (tile.sequence < 0) return w;
    w.sequence = sequence_of(p, tile.sequence);
    w.rows = QueryRows::of(p, w.sequence.band, tile.tile, tile.head);
    w.split = tile.split;
    w.splits = splits != 0 ? splits : p.splits_of(w.sequence.band);
    if (w.split >= w.splits) w.rows.count = 0;
    if (w.any()) w.tiles = KeyTiles::of(w.sequence.band, w.rows, w.split, w.splits, key_tile);
    return w;
  }

  // The entries of the block table that hold the key tiles, of `step` keys each.
  TILEWISE_DEVICE Range pages(const ForwardParams& p, int32_t step) const {
    return pages_from(p, tiles.first, step);
  }
  // The same for the key tiles [first_tile, tiles.last].
  TILEWISE_DEVICE Range pages_from(const ForwardParams& p, int32_t first_tile, int32_t step) const {
    if (sequence.kv.pages == nullptr || tiles.last < first_tile) return {};
    const auto first = static_cast<int32_t>(sequence.kv.first);
    const int32_t end = min(tiles.keys, (tiles.last + 1) * step);
    return {max(0, p.page_size.quotient(first + first_tile * step)),
            min(p.problem.block_table_width, int64_t{p.page_size.quotient(first + end - 1)} + 1)};
  }

  // Narrows a tile with all keys of its sequence to the first of `of_sequence` splits.
  TILEWISE_DEVICE void narrow_to_first_split(int32_t of_sequence) {
    splits = of_sequence;
    tiles.narrow_to_first_split(splits);
  }
};

// Index of the tile that a CTA with one chunk contributes to.
TILEWISE_DEVICE int64_t tile_of_chunk(const ForwardParams& p, const QueryTile& q_tile) {
  return q_tile.sequence.batch * p.order.heads + q_tile.head_chunk.head;
}
// Index of the CTA's partial result: they lie in the order of the chunk numbers, so those of first
// chunks lie at the index of their tile.
TILEWISE_DEVICE int64_t chunk_result_index(const ForwardParams& p, const QueryTile& q_tile) {
  if (q_tile.split == 0) return tile_of_chunk(p, q_tile);
  return int64_t{q_tile.head_chunk.chunk} * p.order.heads + q_tile.head_chunk.head;
}

}  // namespace tilewise::cuda
