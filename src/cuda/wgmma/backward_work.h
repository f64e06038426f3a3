// What a backward block works on, and the walk over the rows that see its keys.
#pragma once

#include "attention/schedule.h"
#include "cuda/ptx/block.h"
#include "cuda/wgmma/backward_plan.h"

namespace tilewise::cuda::wgmma {

inline constexpr int32_t kFar = 1 << 30;

// One step after the other: all tiles of rows, in one query head after the other.
struct RowWalk {
  int32_t row;    // first row of the tile
  int32_t begin;  // of every head
  int32_t end;
  int32_t head;
  int32_t index;    // of the tile among the padded tiles of all heads
  int32_t skipped;  // tiles between the last one of a head and the first one of the next

  TILEWISE_DEVICE void advance(int32_t tile) {
    row += tile;
    ++index;
    if (row != end) return;
    row = begin;
    index += skipped;
    ++head;
  }
};

// Tiles of queries whose first row is one of these need no mask: all of their rows see all keys of
// the block.
struct ClearRows {
  int32_t begin;
  int32_t end;

  TILEWISE_DEVICE bool contains(int32_t row) const { return row >= begin && row < end; }
};

template <class C>
struct KeyWork {
  static constexpr int kKeys = C::kBackward.keys;
  static constexpr int kQueries = C::kBackward.queries;

  static constexpr int kCluster = C::kBackward.cluster;

  int32_t head;  // of K and V
  int32_t rank;  // of the block in its cluster
  int32_t tile;  // of the cluster
  Sequence sequence;
  Range keys;       // of the block; empty: there are some for the other block only
  Range pair_keys;  // of the cluster
  Range row_tiles;
  int32_t group;
  int32_t steps;

  // The keys; false: there are none.
  TILEWISE_DEVICE bool find_keys(const BackwardParams& p) {
    const TileOrder::Work work = p.order.at(index());
    head = work.head;
    tile = work.tile;
    rank = kCluster == 1 ? 0 : static_cast<int32_t>(ptx::block_index() % kCluster);
    if (work.sequence < 0) return false;
    sequence = sequence_of(p.problem, work.sequence);
    if constexpr (!C::kGeneral) sequence.kv.pages = nullptr;
    pair_keys = Tiling{sequence.band.keys, kCluster * kKeys}.at(work.tile);
    keys = part(rank);
    return !pair_keys.empty();
  }
  // What the blocks of a cluster have in common: one flag, one place in the order.
  TILEWISE_DEVICE static int64_t index() { return ptx::block_index() / kCluster; }

  TILEWISE_DEVICE Range part(int of_rank) const {
    if constexpr (kCluster == 1) return pair_keys;
    const int64_t begin = pair_keys.begin + of_rank * kKeys;
    return {begin, max(begin, min(pair_keys.end, begin + kKeys))};
  }
  // The rows that see them.
  TILEWISE_DEVICE void find_rows(const BackwardParams& p) {
    row_tiles = Tiling{sequence.band.rows, kQueries}.touching(sequence.band.rows_of_any(pair_keys));
    group = static_cast<int32_t>(p.problem.heads_q) / static_cast<int32_t>(p.problem.heads_kv);
    steps = static_cast<int32_t>(row_tiles.size()) * group;
  }

  TILEWISE_DEVICE RowWalk walk(const Problem& p) const {
    constexpr PaddedRows kPadded{kQueries};
    const int64_t head_tiles = kPadded.count(p) / kQueries;
    RowWalk w;
    w.row = w.begin = static_cast<int32_t>(row_tiles.begin * kQueries);
    w.end = static_cast<int32_t>(row_tiles.end * kQueries);
    w.head = head * group;
    w.index = static_cast<int32_t>(w.head * head_tiles + row_tiles.begin +
                                   kPadded.first(p, sequence.batch) / kQueries);
    w.skipped = static_cast<int32_t>(head_tiles - row_tiles.size());
    return w;
  }

  TILEWISE_DEVICE ClearRows clear_rows() const {
    const Band& band = sequence.band;
    const Range all = keys.size() == kKeys ? band.rows_of_all(keys) : Range{};
    if (all.empty()) return {0, 0};
    // Rows past the last one need no mask: their P is 0.
    const int64_t end = all.end == band.rows ? int64_t{kFar} : all.end - kQueries + 1;
    return {static_cast<int32_t>(all.begin), static_cast<int32_t>(end)};
  }

  // Rows of a tile of queries that TMA may leave as it finds them: past the last row in use it
  // reads zeros where the tensor ends there, and rows of something else otherwise.
  TILEWISE_DEVICE int32_t rows_to_keep(const Problem& p) const {
    const int64_t rows = sequence.band.rows;
    return sequence.first_row + rows == p.seqlen_q ? kFar : static_cast<int32_t>(rows);
  }
  TILEWISE_DEVICE int32_t keys_to_keep(const Problem& p, Range of_block) const {
    return sequence.kv.first + sequence.band.keys == p.seqlen_k ? kKeys
                                                                : static_cast<int32_t>(of_block.size());
  }
};

// Gradients of keys: like k and v, or one row per key of each sequence (tilewise_gradients).
TILEWISE_FN KvSource gradient_source(const Problem& p, const Sequence& s) {
  const bool per_sequence = p.block_table != nullptr || p.kv_batch_idx != nullptr;
  return per_sequence ? s.kv.dense(s.batch) : KvSource{nullptr, 0, s.kv.slot, s.kv.first};
}

// How many key tiles add to a tile of rows before this one does, for deterministic sums. Blocks are
// numbered in the same order (TileOrder), so a block waits for earlier ones only.
template <class C>
struct Turns {
  static constexpr int kKeys = C::kBackward.cluster * C::kBackward.keys;

  int32_t first_key;  // that row 0 sees, unlimited by the sequence
  int32_t last_key;
  int32_t rows;
  int32_t keys;
  int32_t tile;
  bool last_first;

  TILEWISE_DEVICE static Turns of(const BackwardParams& p, const KeyWork<C>& work) {
    const Band& band = work.sequence.band;
    return {static_cast<int32_t>(clamp(band.shift() - band.left, -kFar, kFar)),
            static_cast<int32_t>(clamp(band.shift() + band.right, -kFar, kFar)),
            static_cast<int32_t>(band.rows),
            static_cast<int32_t>(band.keys),
            work.tile,
            p.order.longest_first == 1};
  }

  // Of the tile of rows from `row` on.
  TILEWISE_DEVICE int32_t at(int32_t row) const {
    const int32_t last_row = min(rows, row + C::kBackward.queries) - 1;
    const int32_t begin = max(0, row + first_key);
    const int32_t last = min(keys - 1, last_row + last_key);
    return last_first ? last / kKeys - tile : tile - begin / kKeys;
  }
};

}  // namespace tilewise::cuda::wgmma
