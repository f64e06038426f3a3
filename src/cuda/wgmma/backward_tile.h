// Descriptors of the backward's work tiles, and the walk over the query tiles of a work tile: those
// that see its keys.
#pragma once

#include "attention/schedule.h"
#include "cuda/common/unmasked_rows.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/backward_plan.h"

namespace tilewise::cuda::wgmma {

// `gradient_source` without code for pages, which gradients do not have.
TILEWISE_FN KvSource key_gradients(const Problem& p, const Sequence& s) {
  const bool per_sequence = p.block_table != nullptr || p.kv_batch_idx != nullptr;
  return per_sequence ? s.kv.dense(s.batch) : KvSource{nullptr, 0, s.kv.batch_index, s.kv.first};
}

// Builds descriptors, in the prepare kernel.
template <class C>
struct DescriptorBuilder {
  static constexpr int kKeys = C::kBackward.keys;
  static constexpr int kQueries = C::kBackward.queries;
  static constexpr int kCluster = C::kBackward.cluster_size;

  const BackwardParams& p;
  TileOrder::WorkTile work_tile;
  Sequence sequence;
  Range keys;       // of the CTA; empty: only the other CTA of the cluster has keys
  Range pair_keys;  // of the cluster

  // The descriptor of one CTA: its rank in the cluster is `index % kCluster`, its work tile is
  // `index / kCluster`.
  TILEWISE_DEVICE static TileDescriptor make(const BackwardParams& p, int32_t index) {
    TileDescriptor r{};
    DescriptorBuilder builder{p, p.order.at(index / kCluster), {}, {}, {}};
    if (builder.work_tile.sequence < 0) return r;
    builder.sequence = sequence_of(p.problem, builder.work_tile.sequence);
    const int64_t all = builder.sequence.band.keys;
    builder.pair_keys = Tiling{all, kCluster * kKeys}.at(builder.work_tile.tile);
    const int rank = index % kCluster;
    builder.keys = builder.keys_of_rank(rank);
    builder.set_rows(r);
    builder.set_keys(r, builder.keys_of_rank(rank ^ 1));
    builder.set_band(r);
    return r;
  }

 private:
  TILEWISE_DEVICE Range keys_of_rank(int rank) const {
    if constexpr (kCluster == 1) return pair_keys;
    const int64_t begin = pair_keys.begin + rank * kKeys;
    return {begin, max(begin, min(pair_keys.end, begin + kKeys))};
  }

  TILEWISE_DEVICE void set_rows(TileDescriptor& r) const {
    constexpr PaddedRows kPadded{kQueries};
    const Problem& problem = p.problem;
    const int64_t rows = sequence.band.rows;
    const Range tiles = pair_keys.empty()
                            ? Range{}
                            : Tiling{rows, kQueries}.touching(sequence.band.rows_of_any(pair_keys));
    const int64_t group = group_size(problem);
    const int64_t head_tiles = kPadded.count(problem) / kQueries;
    r.steps = static_cast<int32_t>(tiles.size() * group);
    r.row = static_cast<int32_t>(tiles.begin * kQueries);
    r.row_end = static_cast<int32_t>(tiles.end * kQueries);
    r.query_head = static_cast<int32_t>(work_tile.head * group);
    r.tile_index = static_cast<int32_t>(work_tile.head * group * head_tiles + tiles.begin +
                                        kPadded.first(problem, sequence.batch) / kQueries);
    r.skipped_tiles = static_cast<int32_t>(head_tiles - tiles.size());
    r.first_row = static_cast<int32_t>(sequence.first_row);
    r.row_batch_index = static_cast<int32_t>(sequence.batch_index);
    // If the sequence ends where the tensor ends, TMA reads zeros past its last row.
    const bool ends = sequence.first_row + rows == problem.seqlen_q;
    r.valid_rows = ends ? common::kMaxRow : static_cast<int32_t>(rows);
  }

  TILEWISE_DEVICE void set_keys(TileDescriptor& r, Range peer_keys) const {
    const Problem& problem = p.problem;
    const KvSource& kv = sequence.kv;
    r.first_key = static_cast<int32_t>(kv.first + keys.begin);
    r.key_batch_index = static_cast<int32_t>(kv.batch_index);
    r.head = work_tile.head;
    r.paged = kv.pages != nullptr ? 1 : 0;
    const bool ends = kv.first + sequence.band.keys == problem.seqlen_k;
    r.valid_keys = ends ? kKeys : static_cast<int32_t>(keys.size());
    r.peer_valid_keys = ends ? kKeys : static_cast<int32_t>(peer_keys.size());
    r.key = static_cast<int32_t>(keys.begin);
    r.key_count = static_cast<int32_t>(keys.size());
    r.key_tile = work_tile.tile;
    r.batch = work_tile.sequence;
    const KvSource source = key_gradients(problem, sequence);
    const Gradients& g = p.gradients;
    r.dk = source.offset(g.dk, keys.begin) + work_tile.head * g.dk.stride_head;
    r.dv = source.offset(g.dv, keys.begin) + work_tile.head * g.dv.stride_head;
  }

  TILEWISE_DEVICE void set_band(TileDescriptor& r) const {
    const Band& band = sequence.band;
    r.low =
        static_cast<int32_t>(clamp(band.shift() - band.left, -common::kMaxRow, common::kMaxRow));
    r.high =
        static_cast<int32_t>(clamp(band.shift() + band.right, -common::kMaxRow, common::kMaxRow));
    r.rows = static_cast<int32_t>(band.rows);
    r.keys = static_cast<int32_t>(band.keys);
    r.shift = static_cast<int32_t>(band.shift());
    const Range all = keys.size() == kKeys ? band.rows_of_all(keys) : Range{};
    if (all.empty()) return;
    // Rows past the last one need no mask, because their P is 0.
    const int64_t end = all.end == band.rows ? int64_t{common::kMaxRow} : all.end - kQueries + 1;
    r.unmasked_begin = static_cast<int32_t>(all.begin);
    r.unmasked_end = static_cast<int32_t>(end);
  }
};

// The descriptor in stage `stage` of shared memory.
template <class C>
TILEWISE_DEVICE const TileDescriptor& tile_descriptor(int stage) {
  return reinterpret_cast<const TileDescriptor*>(ptx::shared_memory() +
                                                 BackwardPlan<C>::kDescriptors)[stage];
}

// Waits until the producer has reached the keys of a work tile and TMA has loaded those that it
// loads. A warp must call this before it arrives at kv_empty(): otherwise, where work tiles have no
// steps, two phases of that barrier could complete before the producer waits for the first.
TILEWISE_DEVICE void wait_for_kv(const BackwardBarriers& barriers, int parity) {
  ptx::mbarrier_wait_parity(barriers.k_full(), parity);
  ptx::mbarrier_wait_parity(barriers.v_full(), parity);
}

// The steps of a work tile: all query tiles of one query head, then those of the next head. What is
// the same for all heads stays in the descriptor.
struct RowWalk {
  const TileDescriptor& work_tile;
  int32_t row;  // first row of the query tile
  int32_t end;
  int32_t head;
  int32_t index;  // of the query tile, among the padded tiles of all heads

  TILEWISE_DEVICE explicit RowWalk(const TileDescriptor& descriptor)
      : work_tile(descriptor),
        row(descriptor.row),
        end(descriptor.row_end),
        head(descriptor.query_head),
        index(descriptor.tile_index) {}

  // For callers that are short of registers: a new head costs a read of shared memory.
  TILEWISE_DEVICE void advance(int32_t tile) {
    row += tile;
    ++index;
    if (row != end) return;
    row = work_tile.row;
    index += work_tile.skipped_tiles;
    ++head;
  }
  TILEWISE_DEVICE RowWalk next(int32_t tile) const {
    RowWalk walk = *this;
    walk.advance(tile);
    return walk;
  }
  // For walks that leave tiles out: moves to tile `number` of a head of the group, both counted
  // from the first.
  TILEWISE_DEVICE void move_to(int32_t head_of_group, int32_t number, int32_t tile) {
    const int32_t tiles = (end - work_tile.row) / tile;
    row = work_tile.row + number * tile;
    head = work_tile.query_head + head_of_group;
    index = work_tile.tile_index + head_of_group * (tiles + work_tile.skipped_tiles) + number;
  }
  // For all other callers, which hold `begin`, the first row of every head, in a register.
  TILEWISE_DEVICE void advance(int32_t tile, int32_t begin) {
    row += tile;
    ++index;
    if (row != end) return;
    row = begin;
    index += work_tile.skipped_tiles;
    ++head;
  }
};

TILEWISE_DEVICE common::UnmaskedRows unmasked_rows(const TileDescriptor& work_tile) {
  return {work_tile.unmasked_begin, work_tile.unmasked_end};
}

// Semaphore order of deterministic dQ sums: how many key tiles add to a query tile before this one
// does. CTAs are numbered in the same order (TileOrder), so a CTA waits only for earlier ones.
template <class C>
struct SemaphoreOrder {
  static constexpr int kKeys = C::kBackward.cluster_size * C::kBackward.keys;

  int32_t low;
  int32_t high;
  int32_t rows;
  int32_t keys;
  int32_t tile;
  bool last_first;

  TILEWISE_DEVICE SemaphoreOrder(const BackwardParams& p, const TileDescriptor& work_tile)
      : low(work_tile.low),
        high(work_tile.high),
        rows(work_tile.rows),
        keys(work_tile.keys),
        tile(work_tile.key_tile),
        last_first(p.order.longest_tile == LongestTile::last) {}

  // For the query tile that starts at `row`.
  TILEWISE_DEVICE int32_t at(int32_t row) const {
    const int32_t last_row = min(rows, row + C::kBackward.queries) - 1;
    const int32_t begin = max(0, row + low);
    const int32_t last = min(keys - 1, last_row + high);
    return last_first ? last / kKeys - tile : tile - begin / kKeys;
  }
};

}  // namespace tilewise::cuda::wgmma
