// What a CTA of the second derivatives owns, and what it walks: query rows and keys, or keys and
// query rows.
//
// The scores do not change if rows and keys exchange their places, and so dK is the dQ of the
// transposed problem. The kernel is therefore written for rows that walk keys. For a CTA that owns
// keys, OwnsKeys gives it the transposed sequence: what a QueryTile then calls rows are keys, and
// what it calls keys are rows.
#pragma once

#include "cuda/common/query_tile.h"
#include "cuda/mma_sync/backward_plan.h"
#include "cuda/mma_sync/second_statistics.h"
#include "cuda/mma_sync/second_sums.h"

namespace tilewise::cuda::mma_sync {

// The operands of one side: q, q', dout' and dout, or k, k', v and v'. S = Q K^T and E = dO' V^T
// are products of values; those of tangents, to which dout belongs here, are S' = Q' K^T + Q K'^T
// and F = dO V^T + dO' V'^T.
struct SecondOperands {
  const tilewise_tensor& of_scores;
  const tilewise_tensor& of_scores_tangent;
  const tilewise_tensor& of_values;
  const tilewise_tensor& of_values_tangent;
};

TILEWISE_DEVICE SecondOperands operands_of_rows(const SecondParams& p) {
  return {p.problem.q, p.tangents.q, p.tangents.dout, p.gradients.dout};
}
TILEWISE_DEVICE SecondOperands operands_of_keys(const SecondParams& p) {
  return {p.problem.k, p.tangents.k, p.problem.v, p.tangents.v};
}

// The heads of the walked side that meet a head of the owned one.
struct HeadRange {
  int32_t begin;
  int32_t end;
};

TILEWISE_DEVICE int32_t heads_per_group(const Problem& p) {
  return static_cast<int32_t>(p.heads_q) / static_cast<int32_t>(p.heads_kv);
}

// The tile of `rows` rows from row `first` on, of one head, with all keys in tiles of `keys`.
TILEWISE_DEVICE QueryTile unpacked_tile(const Sequence& s, int64_t first, int64_t head, int rows,
                                        int keys) {
  QueryTile t;
  t.sequence = s;
  t.sequence.kv.pages = nullptr;
  t.rows = {.first = static_cast<int32_t>(first),
            .first_head = static_cast<int32_t>(head),
            .group = 1,
            .offset = 0,
            .reciprocal = 1u << 31,
            .count = static_cast<int32_t>(clamp(s.band.rows - first, 0, rows))};
  t.split = 0;
  t.splits = 1;
  if (!t.any()) return t;
  t.tiles = KeyTiles::of(s.band, t.rows, 0, 1, keys);
  t.tiles.find_full(t.rows, keys);
  return t;
}

struct OwnsRows {
  template <class Arch>
  static constexpr arch::ForwardTile tile(int element_bytes, int head_dim) {
    return arch::second_rows_tile<Arch>(element_bytes, head_dim);
  }
  template <class C>
  using Statistics = OwnedStatistics<C>;
  template <class C>
  using ValueSums = NoValueSums<C>;

  TILEWISE_DEVICE static SecondOperands owned(const SecondParams& p) { return operands_of_rows(p); }
  TILEWISE_DEVICE static SecondOperands walked(const SecondParams& p) {
    return operands_of_keys(p);
  }
  TILEWISE_DEVICE static const tilewise_tensor& gradient(const SecondParams& p) {
    return p.gradients.dq;
  }
  TILEWISE_DEVICE static const Flags& flags(const SecondParams& p) { return p.row_flags; }

  // The padded row tile of a CTA. CTAs take the tiles of a head from the last to the first, because
  // the last rows of a causal problem see the most keys.
  TILEWISE_DEVICE static int64_t tile_index(const SecondParams& p) {
    const int64_t tiles = p.rows.count(p.problem) / p.rows.tile;
    const int64_t in_head = ptx::block_index() % tiles;
    return ptx::block_index() - in_head + (tiles - 1 - in_head);
  }
  template <class C>
  TILEWISE_DEVICE static QueryTile tile_at(const SecondParams& p, int64_t index) {
    const int64_t tiles = p.rows.count(p.problem) / p.rows.tile;
    const PaddedRows::TileStart start = p.rows.locate(p.problem, index % tiles);
    QueryTile none;
    none.rows.count = 0;
    if (start.batch < 0) return none;
    return unpacked_tile(sequence_of(p.problem, start.batch), start.row0, index / tiles,
                         C::kForward.rows(), C::kForward.keys);
  }
  TILEWISE_DEVICE static HeadRange walked_heads(const Problem& p, int32_t head) {
    const int32_t of_keys = head / heads_per_group(p);
    return {of_keys, of_keys + 1};
  }
  // The gradients lie where the operands do.
  TILEWISE_DEVICE static void move_to_gradients(const Problem&, QueryTile&) {}
};

struct OwnsKeys {
  template <class Arch>
  static constexpr arch::ForwardTile tile(int element_bytes, int head_dim) {
    return arch::second_keys_tile<Arch>(element_bytes, head_dim);
  }
  template <class C>
  using Statistics = WalkedStatistics<C>;
  template <class C>
  using ValueSums = SumsOfValues<C>;

  TILEWISE_DEVICE static SecondOperands owned(const SecondParams& p) { return operands_of_keys(p); }
  TILEWISE_DEVICE static SecondOperands walked(const SecondParams& p) {
    return operands_of_rows(p);
  }
  TILEWISE_DEVICE static const tilewise_tensor& gradient(const SecondParams& p) {
    return p.gradients.dk;
  }
  TILEWISE_DEVICE static const Flags& flags(const SecondParams& p) { return p.key_flags; }

  // The number of a CTA's tile in params.order.
  TILEWISE_DEVICE static int64_t tile_index(const SecondParams&) { return ptx::block_index(); }
  template <class C>
  TILEWISE_DEVICE static QueryTile tile_at(const SecondParams& p, int64_t index) {
    const TileOrder::WorkTile tile = p.order.at(index);
    QueryTile none;
    none.rows.count = 0;
    if (tile.sequence < 0) return none;
    return unpacked_tile(transposed(sequence_of(p.problem, tile.sequence)),
                         int64_t{tile.tile} * C::kForward.rows(), tile.head, C::kForward.rows(),
                         C::kForward.keys);
  }
  TILEWISE_DEVICE static HeadRange walked_heads(const Problem& p, int32_t head) {
    const int32_t group = heads_per_group(p);
    return {head * group, (head + 1) * group};
  }
  // With kv_batch_idx each sequence has gradients of its own (gradient_source).
  TILEWISE_DEVICE static void move_to_gradients(const Problem& p, QueryTile& tile) {
    if (p.kv_batch_idx != nullptr) tile.sequence.batch_index = tile.sequence.batch;
  }

 private:
  TILEWISE_DEVICE static Sequence transposed(const Sequence& s) {
    Sequence t = s;
    t.band = s.band.transposed();
    t.batch_index = s.kv.batch_index;
    t.first_row = s.kv.first;
    t.kv.batch_index = s.batch_index;
    t.kv.first = s.first_row;
    return t;
  }
};

}  // namespace tilewise::cuda::mma_sync
