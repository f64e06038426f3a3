// What the host hands to the kernels. Plain data, understood by both compilers.
#pragma once

#include "attention/index_fault.h"
#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/key_record.h"
#include "cuda/next_start.h"
#include "cuda/order.h"
#include "cuda/shares.h"
#include "cuda/spread.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda {

// Rows of all sequences together, as out, lse and the partial results count them: batch * seqlen_q,
// or T. `flat_row` is the index of row i of a sequence among them.
TILEWISE_FN int64_t total_rows(const Problem& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : p.batch * p.seqlen_q;
}
TILEWISE_FN int64_t flat_row(const Problem& p, const Sequence& s, int64_t i) {
  return (p.cu_seqlens_q != nullptr ? 0 : s.batch * p.seqlen_q) + s.first_row + i;
}

// Rows of the results of key splits: `pitch` per sequence, or, when it is 0, as `total_rows`.
TILEWISE_FN int64_t partial_rows(const Problem& p, int32_t pitch) {
  return pitch != 0 ? p.batch * pitch : total_rows(p);
}
TILEWISE_FN int64_t partial_row(const Problem& p, int32_t pitch, const Sequence& s, int64_t i) {
  return pitch != 0 ? s.batch * pitch + i : flat_row(p, s, i);
}

// Rows padded to whole tiles per sequence: how the backward keeps its row statistics and its dQ
// sums. Variable length needs no table: a sequence starts at its first row rounded down, plus one
// tile for every sequence before it, which leaves room for ceil(length / tile) tiles.
struct PaddedRows {
  int32_t tile;

  TILEWISE_FN int64_t first(const Problem& p, int64_t batch) const {
    if (p.cu_seqlens_q == nullptr) return batch * round_up(p.seqlen_q, tile);
    return p.cu_seqlens_q[batch] / tile * tile + batch * tile;
  }
  TILEWISE_FN int64_t count(const Problem& p) const {
    if (p.cu_seqlens_q == nullptr) return p.batch * round_up(p.seqlen_q, tile);
    return (p.seqlen_q / tile + p.batch + 1) * tile;
  }
  // Which rows padded tile `index` (of one head) holds: row0 of a sequence; sequence -1: none.
  struct Place {
    int64_t batch;
    int64_t row0;
  };
  TILEWISE_FN Place locate(const Problem& p, int64_t index) const {
    if (p.batch == 0) return {-1, 0};
    int64_t low = 0;
    int64_t high = p.batch - 1;
    while (low < high) {  // the last sequence that starts at or before the tile
      const int64_t middle = (low + high + 1) / 2;
      if (first(p, middle) <= index * tile)
        low = middle;
      else
        high = middle - 1;
    }
    const int64_t row0 = index * tile - first(p, low);
    if (row0 < 0 || row0 >= query_rows(p, low).size()) return {-1, 0};
    return {low, row0};
  }
};

// 0 * NaN is NaN in a tensor core: a masked key of an edge tile would spoil rows that do not see
// it. A block of such a problem writes whether what it has summed is finite; the simt family then
// computes the flagged tiles again, element by element. `flags` is null where no band is in force,
// and where a kernel sees to it itself (the forward of wgmma).
struct Flags {
  uint8_t* data = nullptr;  // one per block of the main launch; with equal parts one per tile, too
  int32_t per_tile = 1;     // blocks that share a tile of the second launch: key splits
  int32_t tiles = 0;        // of the second launch, whose blocks share them (simt/tile_walk.h)

  TILEWISE_FN bool any(int64_t tile) const {
    uint32_t found = 0;  // no early end: the loads do not wait for each other
    for (int32_t i = 0; i < per_tile; ++i) found |= data[tile * per_tile + i];
    return found != 0;
  }
  // With equal parts: who merges them joins those of parts to that of a tile.
  TILEWISE_FN uint8_t* of_part(int64_t place) const { return data + tiles + place; }
};

// How many parts of a tile are done, and where they are: the sum of what they arrive with. Memory
// of unknown contents becomes a record when it holds the number of the launch, which no other
// launch of the process has; whoever is done last makes it 0 again, since a graph launches with the
// same number many times.
struct PartArrivals {
  uint64_t state;  // launch: 44 bits, second part: 10, arrived: 10

  static constexpr int kCountBits = 10;
  static constexpr int32_t kMost = (1 << kCountBits) - 1;  // parts of a tile, places of others

  TILEWISE_FN static constexpr uint64_t of_launch(uint64_t number) {
    return number << (2 * kCountBits);
  }
  TILEWISE_FN static constexpr bool is_of(uint64_t state, uint64_t launch) {
    return (state ^ launch) >> (2 * kCountBits) == 0;
  }
  // Of a split; `other`: its place among all parts that are not first.
  TILEWISE_FN static constexpr uint64_t arrival(int32_t split, int32_t other) {
    return 1 + (split == 1 ? static_cast<uint64_t>(other) << kCountBits : 0);
  }
  TILEWISE_FN static constexpr int32_t arrived(uint64_t state) { return bits(state); }
  // The place of split 1, when it has arrived.
  TILEWISE_FN static constexpr int32_t second(uint64_t state) { return bits(state >> kCountBits); }

 private:
  TILEWISE_FN static constexpr int32_t bits(uint64_t state) {
    return static_cast<int32_t>(state & ((1u << kCountBits) - 1));
  }
};

// Rows in use and keys in use are written by the main kernels, everything else by
// common/prepare.cuh.
struct ForwardParams {
  Problem problem;
  TileOrder order;
  Packing packing;   // heads of a tile: 1, or the group size
  int32_t row_tile;  // packed rows of a tile
  int32_t key_tile;  // splits are cut at multiples of it
  Flags flags;       // mma_sync writes them; simt, when they are given, takes flagged tiles only
  SplitRule rule;    // how many of the splits a sequence has
  int32_t pitch;     // of the partial results: `partial_row`
  // Parts > 1: [splits, partial_rows, heads_q, head_dim_v], normalised, anything where the lse of
  // the split is -inf; with equal parts: [blocks, packed_rows, head_dim_v] or, where the main
  // kernel merges them, as mma_sync/forward_merge.h has it; of shared works: [shares.slots(),
  // row_tile, shares.columns].
  float* partial_out;
  float* partial_lse;  // the same without columns, and without the sink
  EqualParts parts;    // of a batch, instead of splits: decoding. A block has a part and head
  int32_t most_keys = INT32_MAX;        // of a sequence that fits
  Spread spread;                        // of them
  Shares shares;                        // wgmma's plain form
  PartArrivals* arrivals;               // of each tile; null: a second kernel merges the parts
  uint64_t launch;                      // PartArrivals::of_launch
  Divisor packed_rows = 1;              // with equal parts: of a tile, at most
  Divisor group = 1;                    // query heads per key/value head, whether packed or not
  Divisor page_size = 1;                // of the forms of pages, and of boxes of pages
  uint32_t pack_reciprocal = 1u << 31;  // ceil(2^31 / packing.group)
  bool shape_says_all = false;          // attention/problem.h
  bool merges_splits = false;           // the blocks of the splits of a tile are a cluster
  NextStart next = NextStart::at_end;   // the launch after this one; simt does not ask
  IndexRecord* record = nullptr;        // where an index array is at fault

  // Of the keys of a sequence, which are not in equal parts; 1: its results go straight to out.
  TILEWISE_FN int32_t splits_of(const Band& band) const {
    if (order.splits == 1 || rule.least == 0) return order.splits;
    return static_cast<int32_t>(rule.parts(band.rows, band.keys));
  }
};

struct BackwardParams {
  Problem problem;
  Gradients gradients;
  TileOrder order;  // of key tiles and key/value heads
  int32_t key_tile;
  PaddedRows rows;  // row tiles: block head * (rows.count / rows.tile) + tile of the row kernels
  Flags key_flags;  // written by the main kernel, per block
  Flags row_flags;  // written by the finish kernel, per block
  // [heads_q, rows.count], written by the prepare kernel for its own family. mma_sync:
  // row_lse = -lse / ln 2 and row_delta = dlse - sum(out dout), so that dS = P (dP + row_delta)
  // with P = exp2(S / ln 2 + row_lse); a row that is not in use or sees no key has -1e30 and 0: its
  // P is 0.
  float* row_lse;
  float* row_delta;
  // Rows whose |lse| is so large that fp32 has no room for an exponent beside it (is_far_row) have
  // a row_lse of 0: their scores are first made relative to lse and its low part, which lie here in
  // natural units; 0 for all other rows. So that nobody else pays for it, *far_rows is `launch`
  // when there is such a row at all. Nobody zeroes it: the number is that of no other launch of the
  // process, and a graph that launches again may find it set, which costs time only.
  float* row_origin;
  float* row_origin_low;
  uint64_t* far_rows;
  uint64_t launch;
  float* dq_sum;   // [heads_q, rows.count, head-dim tile], private order inside a tile
  int32_t* turns;  // deterministic: [heads_q, rows.count / tile] key tiles that have added theirs
  float* dscale_parts;  // one per block of the finish kernel, or null
  // wgmma: `works` pieces of work of one record per block of a cluster. A smaller grid shares them:
  // who is ready takes the next one, `*counter` less than the number of blocks.
  KeyRecord* records = nullptr;
  int32_t works = 0;
  int32_t* counter = nullptr;  // null: a block has one piece of work
};

// The wgmma family: the same, and how TMA reads the tensors. Boxes of q and dout have a row tile of
// a warpgroup or of the block, those of k and v a key tile (cuda/wgmma/config.h).
struct TmaForwardParams : ForwardParams {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap k_end;  // decoding: in smaller boxes (kRowsOfEndBox)
  TensorMap v_end;
  int32_t slots = 0;           // decoding: of the ring of each warp; 0: all
  int32_t page_box_rows = 0;   // wgmma: of a box of a page
  int32_t work = 0;            // blocks of `order`, which a smaller grid shares; others follow
  int32_t* counter = nullptr;  // works of different lengths: how many were taken, 0 at first
  bool may_spoil = false;      // a band is in force
  int32_t* before = nullptr;   // wgmma/forward_repair.h: [works, math warps], nothing at first
};

struct TmaBackwardParams : BackwardParams {
  TensorMap q;
  TensorMap dout;
  TensorMap k;
  TensorMap v;
};

}  // namespace tilewise::cuda
