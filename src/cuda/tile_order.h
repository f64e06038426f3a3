// The map from the CTAs of a grid to tiles, heads and sequences.
#pragma once

#include "attention/problem.h"
#include "base/divisor.h"
#include "base/math.h"

namespace tilewise::cuda {

// Which tile of a sequence has the most work and starts first; none: all have about the same.
enum class LongestTile : int32_t { none, last, first };

// The order of the work tiles. Forward tiles are packed query rows of query heads (of key/value
// heads when the GQA group is packed into the tile); backward tiles are keys of key/value heads.
//
// Dense batches: the order follows from the shape. The heads of all sequences ("batch heads") are
// taken in groups whose keys and values stay in L2 together. Inside a group the tiles of its heads
// are interleaved, and longer tiles come first if tiles differ in length (LPT order, causal
// masks). With groups of one head, the tiles of a head follow each other. If a CTA takes two tiles
// at a time (`paired_tiles`), a long and a short one are neighbours.
//
// Varlen batches: `table` has the sequences, longest first, as common/prepare.cuh writes it. The
// grid is an upper bound, and CTAs past the last tile exit. If no sequence has more than one tile,
// the order follows from the shape as well.
struct TileOrder {
  struct Entry {
    int32_t first;  // tiles of the sequences before this one, counted per head
    int32_t sequence;
  };

  Divisor tiles = 0;  // per sequence of a dense batch
  Divisor heads = 1;
  int32_t sequences = 0;
  Divisor splits = 1;           // of a tile; they are neighbours in the grid
  Divisor head_group = 1;       // batch heads whose tiles are interleaved; not a GQA group
  Divisor last_head_group = 1;  // batch heads of the last group
  LongestTile longest_tile = LongestTile::none;
  // The first `paired_tiles` tiles of the order are taken in pairs. The tiles of a head follow each
  // other as last, first, last but one, second, ..., reversed for every other head, so that all
  // pairs are equally long if tile lengths grow linearly.
  int32_t paired_tiles = 0;
  const Entry* table = nullptr;  // [sequences + 1]; the last entry has the total

  // For dense batches: interleaves the tiles of groups of heads.
  void interleave_heads(int64_t heads_per_group) {
    const int64_t batch_heads = int64_t{heads} * sequences;  // may be 0
    head_group = static_cast<int32_t>(clamp(heads_per_group, 1, clamp(batch_heads, 1, INT32_MAX)));
    const auto remainder = static_cast<int32_t>(batch_heads % head_group);
    last_head_group = remainder == 0 ? static_cast<int32_t>(head_group) : remainder;
  }

  // For dense batches whose tile lengths grow linearly, and a persistent grid of `ctas` CTAs that
  // take pairs wave by wave, every other wave in reverse. Pairs fill as many whole waves as
  // possible; the remaining heads follow as one interleaved group, longest tiles first. This is 1 %
  // slower on average than dynamic scheduling, but it needs no counter and no kernel that zeroes
  // one. The last wave of pairs joins the group if it would be less than half full or if heads have
  // more than kShort tiles.
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
    int32_t sequence;  // -1: the CTA has no tile
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

  // The same as `at` if every sequence has one tile.
  TILEWISE_FN WorkTile at_only_tile(int64_t block) const {
    const int32_t index = splits.quotient(static_cast<int32_t>(block));
    return {0, heads.remainder(index), heads.quotient(index),
            splits.remainder(static_cast<int32_t>(block))};
  }

 private:
  TILEWISE_FN int32_t tile_at_position(int32_t tile, int32_t count) const {
    return longest_tile == LongestTile::last ? count - 1 - tile : tile;
  }
  TILEWISE_FN static int32_t paired_tile_at_position(int32_t tile, int32_t count,
                                                     int32_t batch_head) {
    const int32_t at = batch_head % 2 == 0 ? tile : count - 1 - tile;
    return at % 2 == 0 ? count - 1 - at / 2 : at / 2;
  }

  // One path for all orders, because in a kernel that has just started every branch waits for
  // instructions to be fetched.
  TILEWISE_FN WorkTile dense_tile(int32_t index) const {
    const int32_t start_of_last_group = heads * sequences - last_head_group;
    const int32_t first =
        min(head_group.quotient(tiles.quotient(index)) * head_group, start_of_last_group);
    const int32_t position = index - first * tiles;  // inside the group
    const Divisor width = first < start_of_last_group ? head_group : last_head_group;
    const int32_t tile = width.quotient(position);
    const int32_t batch_head = first + position - tile * width;
    return {index < paired_tiles ? paired_tile_at_position(tile, tiles, batch_head)
                                 : tile_at_position(tile, tiles),
            heads.remainder(batch_head), heads.quotient(batch_head), 0};
  }

  TILEWISE_FN WorkTile varlen_tile(int32_t index) const {
    if (index >= table[sequences].first * heads) return {0, 0, -1, 0};
    int32_t low = 0;
    int32_t high = sequences - 1;
    while (low < high) {  // the last entry that starts at or before `index`
      const int32_t middle = (low + high + 1) / 2;
      if (table[middle].first * heads <= index)
        low = middle;
      else
        high = middle - 1;
    }
    const int32_t count = table[low + 1].first - table[low].first;
    const int32_t position = index - table[low].first * heads;
    if (longest_tile == LongestTile::none)
      return {position % count, position / count, table[low].sequence, 0};
    return {tile_at_position(heads.quotient(position), count), heads.remainder(position),
            table[low].sequence, 0};
  }
};

}  // namespace tilewise::cuda
