// Which block of a grid takes which tile of which head of which sequence.
#pragma once

#include "attention/problem.h"
#include "base/divisor.h"
#include "base/math.h"

namespace tilewise::cuda {

// Forward tiles are packed query rows and heads are query heads (key/value heads when the group is
// packed into the tile); backward tiles are keys and heads are key/value heads.
//
// Dense problems: the order follows from the shape. Heads are taken in sections whose keys and
// values stay in L2 together; inside a section the longest tiles go first where tiles differ in
// length (causal), otherwise a head's tiles follow each other. Where a block takes two works at
// once (`paired_tiles`), a long tile and a short one follow each other.
//
// Variable length: `table` holds the sequences, longest first, as prepared by common/prepare.cuh;
// the grid is an upper bound and blocks past the end find nothing. Where no sequence has more than
// one tile, the order follows from the shape here, too.
struct TileOrder {
  struct Entry {
    int32_t first;  // tiles of the sequences before this one, counted per head
    int32_t sequence;
  };

  Divisor tiles = 0;  // of one dense sequence
  Divisor heads = 1;
  int32_t sequences = 0;
  Divisor splits = 1;         // of a tile: blocks that follow each other
  Divisor head_group = 1;        // (head, sequence) couples walked together; 1: head by head
  Divisor last_head_group = 1;   // those of the last section
  int32_t longest_first = 0;  // 0: tile by tile of a head; 1: last tiles first; 2: first ones first
  // Works that are taken two by two. Head by head, the last tile, the first one, the last but one,
  // ..., of every other head backwards: where tiles grow evenly, two after each other are as much
  // work as any other two.
  int32_t paired_tiles = 0;
  const Entry* table = nullptr;  // [sequences + 1], the last entry holds the total

  // Of dense problems.
  void interleave_heads(int64_t heads_per_group) {
    const int64_t batch_heads = int64_t{heads} * sequences;  // of rows or keys, or of none
    head_group = static_cast<int32_t>(clamp(heads_per_group, 1, clamp(batch_heads, 1, INT32_MAX)));
    const auto remainder = static_cast<int32_t>(batch_heads % head_group);
    last_head_group = remainder == 0 ? static_cast<int32_t>(head_group) : remainder;
  }

  // Of dense problems whose tiles grow evenly, for `blocks` that take them in rounds, every other
  // one backwards: pairs as long as rounds are full, then the heads that are left as one section,
  // longest tiles first. On average 1 % longer than who is done takes the next one, which needs a
  // counter, and a kernel to zero it. A last round of pairs that would be half empty joins the
  // section, and so does a whole one of long tiles.
  void pair_tiles_for_waves(int32_t ctas) {
    constexpr int32_t kShort = 8;
    const int64_t batch_heads = int64_t{heads} * sequences;
    int64_t pairs_in_last_wave = batch_heads * tiles / 2 % ctas;
    if (tiles > kShort || 2 * pairs_in_last_wave < ctas) pairs_in_last_wave += ctas;
    int64_t unpaired_heads = min(batch_heads, ceil_div(2 * pairs_in_last_wave, tiles));
    if ((batch_heads - unpaired_heads) * tiles % 2 != 0) ++unpaired_heads;
    head_group = 1;
    last_head_group = static_cast<int32_t>(max<int64_t>(1, unpaired_heads));
    paired_tiles = static_cast<int32_t>((batch_heads - unpaired_heads) * tiles);
  }

  struct WorkTile {
    int32_t tile;
    int32_t head;
    int32_t sequence;  // -1: nothing to do
    int32_t split;
  };

  TILEWISE_FN WorkTile at(int64_t block) const {
    const int32_t index = splits.quotient(static_cast<int32_t>(block));
    WorkTile w;
    if (table == nullptr) [[likely]]
      w = dense_tile(index);
    else
      w = varlen_tile(index);
    w.split = splits.remainder(static_cast<int32_t>(block));
    return w;
  }

  // The same where every sequence has one tile.
  TILEWISE_FN WorkTile at_only_tile(int64_t block) const {
    const int32_t index = splits.quotient(static_cast<int32_t>(block));
    return {0, heads.remainder(index), heads.quotient(index),
            splits.remainder(static_cast<int32_t>(block))};
  }

 private:
  TILEWISE_FN int32_t tile_at_position(int32_t tile, int32_t count) const {
    return longest_first == 1 ? count - 1 - tile : tile;
  }
  TILEWISE_FN static int32_t paired_tile_at_position(int32_t tile, int32_t count, int32_t batch_head) {
    const int32_t at = batch_head % 2 == 0 ? tile : count - 1 - tile;
    return at % 2 == 0 ? count - 1 - at / 2 : at / 2;
  }

  // One way for all orders: a branch of a GPU that has just started waits for its instructions.
  TILEWISE_FN WorkTile dense_tile(int32_t index) const {
    const int32_t start_of_last_group = heads * sequences - last_head_group;
    const int32_t first = min(head_group.quotient(tiles.quotient(index)) * head_group, start_of_last_group);
    const int32_t position = index - first * tiles;  // of the section, all couples of a tile
    const Divisor width = first < start_of_last_group ? head_group : last_head_group;
    const int32_t tile = width.quotient(position);
    const int32_t batch_head = first + position - tile * width;
    return {index < paired_tiles ? paired_tile_at_position(tile, tiles, batch_head) : tile_at_position(tile, tiles),
            heads.remainder(batch_head), heads.quotient(batch_head), 0};
  }

  TILEWISE_FN WorkTile varlen_tile(int32_t index) const {
    if (index >= table[sequences].first * heads) return {0, 0, -1, 0};
    int32_t low = 0;
    int32_t high = sequences - 1;
    while (low < high) {  // the last entry that starts at or before this block
      const int32_t middle = (low + high + 1) / 2;
      if (table[middle].first * heads <= index)
        low = middle;
      else
        high = middle - 1;
    }
    const int32_t count = table[low + 1].first - table[low].first;
    const int32_t position = index - table[low].first * heads;
    if (longest_first == 0) return {position % count, position / count, table[low].sequence, 0};
    return {tile_at_position(heads.quotient(position), count), heads.remainder(position), table[low].sequence, 0};
  }
};

}  // namespace tilewise::cuda
