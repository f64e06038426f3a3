// What the host hands to the kernels. Plain data, understood by both compilers.
#pragma once

#include "attention/index_fault.h"
#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/cta_placement.h"
#include "cuda/pdl_trigger.h"
#include "cuda/stream_k_tail.h"
#include "cuda/tensor_map.h"
#include "cuda/tile_descriptor.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda {

// Rows of all sequences together, as out, lse and the partial results count them: batch * seqlen_q,
// or T. `flat_row` is the index of row i of a sequence among them.
TILEWISE_FN int64_t total_rows(const Problem& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : p.batch * p.seqlen_q;
}
TILEWISE_FN int64_t flat_row(const Problem& p, const Sequence& s, int64_t i) {
  return (p.cu_seqlens_q != nullptr ? 0 : s.batch * p.seqlen_q) + s.first_row + i;
}

// Rows of the partial results of splits: `partial_stride` per sequence or, when that is 0, as
// `total_rows` counts them.
TILEWISE_FN int64_t partial_rows(const Problem& p, int32_t partial_stride) {
  return partial_stride != 0 ? p.batch * partial_stride : total_rows(p);
}
TILEWISE_FN int64_t partial_row(const Problem& p, int32_t partial_stride, const Sequence& s,
                                int64_t i) {
  return partial_stride != 0 ? s.batch * partial_stride + i : flat_row(p, s, i);
}

// Rows padded to whole tiles per sequence: the layout of the backward's row statistics and dQ sums.
// Varlen needs no table: a sequence starts at its first row rounded down, plus one tile for every
// sequence before it, which leaves room for ceil(length / tile) tiles.
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

// 0 * NaN is NaN in a tensor core, so a masked key of an edge tile would contaminate rows that do
// not see it. Where that can happen, a CTA of the main kernel writes whether its results are
// finite, and the simt family then recomputes the flagged tiles element by element. `data` is null
// where no band is in force, and for kernels that recompute such rows themselves (the wgmma
// forward).
struct Flags {
  uint8_t* data = nullptr;  // one per CTA of the main kernel; with chunks also one per tile before
  int32_t per_tile = 1;     // CTAs of the main kernel, splits, per tile of the recompute
  int32_t tiles = 0;        // of the recompute, whose CTAs share them (simt/recompute_tiles.h)

  TILEWISE_FN bool any(int64_t tile) const {
    uint32_t found = 0;  // no early exit, so that the loads do not wait for each other
    for (int32_t i = 0; i < per_tile; ++i) found |= data[tile * per_tile + i];
    return found != 0;
  }
  // The flag of a chunk; the CTA that combines the chunks of a tile ors them into the tile's flag.
  TILEWISE_FN uint8_t* of_chunk(int64_t chunk) const { return data + tiles + chunk; }
};

// Counts the finished chunks of a tile, so that the CTA that finishes last combines them. A 64-bit
// counter tagged with the launch id, so it needs no zeroing: memory of unknown contents is taken
// for 0 unless its tag is that of this launch. The CTA that combines resets it to 0, because a
// captured graph launches many times with the same id.
struct ChunkArrivals {
  uint64_t state;  // launch id: 44 bits, position of chunk 1: 10, arrived: 10

  static constexpr int kCountBits = 10;
  static constexpr int32_t kMaxChunks =
      (1 << kCountBits) - 1;  // of chunks per tile, and of positions

  TILEWISE_FN static constexpr uint64_t of_launch(uint64_t number) {
    return number << (2 * kCountBits);
  }
  TILEWISE_FN static constexpr bool is_of(uint64_t state, uint64_t launch) {
    return (state ^ launch) >> (2 * kCountBits) == 0;
  }
  // What chunk `index` of a tile adds; `position`: its own among all chunks that are not the first
  // of their tile.
  TILEWISE_FN static constexpr uint64_t arrival(int32_t index, int32_t position) {
    return 1 + (index == 1 ? static_cast<uint64_t>(position) << kCountBits : 0);
  }
  TILEWISE_FN static constexpr int32_t arrived(uint64_t state) { return bits(state); }
  // The position of chunk 1, when it has arrived.
  TILEWISE_FN static constexpr int32_t position_of_chunk_1(uint64_t state) {
    return bits(state >> kCountBits);
  }

 private:
  TILEWISE_FN static constexpr int32_t bits(uint64_t state) {
    return static_cast<int32_t>(state & ((1u << kCountBits) - 1));
  }
};

// The main kernels write valid rows and keys; common/prepare.cuh writes everything else.
struct ForwardParams {
  Problem problem;
  TileOrder order;
  Packing packing;       // query heads in one tile: 1 or the group size
  int32_t row_tile;      // packed rows of a tile
  int32_t key_tile;      // splits are cut at multiples of it
  Flags flags;           // written by mma_sync; simt, when they are given, takes flagged tiles only
  SplitRule split_rule;  // splits per sequence
  int32_t partial_stride;  // of the partial results, see `partial_row`
  // Partial results, normalised; undefined where the lse of the split is -inf.
  //   splits:   [splits, partial_rows, heads_q, head_dim_v]
  //   chunks:   [CTAs, packed_rows, head_dim_v]; where the main kernel combines them as in
  //             mma_sync/forward_combine.h
  //   Stream-K: [stream_k.num_results(), row_tile, stream_k.columns]
  float* partial_out;
  float* partial_lse;                   // the same without columns, and without the sink
  ChunkSchedule chunks;                 // decoding: instead of splits. A CTA has a chunk and a head
  int32_t max_keys = INT32_MAX;         // of a sequence that fits
  CtaPlacement placement;               // of the chunks
  StreamKTail stream_k;                 // wgmma, fast path
  ChunkArrivals* arrivals;              // [tiles]; null: a combine kernel merges the chunks
  uint64_t launch_id;                   // ChunkArrivals::of_launch
  Divisor packed_rows = 1;              // with chunks: upper bound per tile
  Divisor group = 1;                    // query heads per key/value head, whether packed or not
  Divisor page_size = 1;                // of the paged forms
  uint32_t pack_reciprocal = 1u << 31;  // ceil(2^31 / packing.group)
  bool has_uniform_sequences = false;   // attention/problem.h
  bool cluster_combines = false;        // the CTAs of a tile's splits are a cluster
  PdlTrigger pdl_trigger = PdlTrigger::at_exit;  // simt ignores it
  IndexRecord* index_record = nullptr;           // where faults of index arrays are recorded

  // Splits of the keys of a sequence without chunks; with 1 its results go straight to out.
  TILEWISE_FN int32_t splits_of(const Band& band) const {
    if (order.splits == 1 || split_rule.min_keys == 0) return order.splits;
    return static_cast<int32_t>(split_rule.splits(band.rows, band.keys));
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
  // natural units; 0 for all other rows. Problems without such rows pay nothing: *far_rows is
  // `launch_id` when there is one. It needs no zeroing, because no other launch of the process has
  // that id; a graph that launches again may find it set, which only costs time.
  float* row_origin;
  float* row_origin_low;
  uint64_t* far_rows;
  uint64_t launch_id;
  float* dq_sum;           // [heads_q, rows.count, head-dim tile], private order inside a tile
  int32_t* dq_semaphores;  // deterministic: [heads_q, rows.count / tile] key tiles that were added
  float* dscale_partials;  // one per CTA of the finish kernel, or null
  // wgmma: `num_tiles` work tiles with one descriptor per CTA of a cluster. A persistent grid takes
  // them dynamically: `*tile_counter` counts those taken beyond the first one of each cluster.
  TileDescriptor* descriptors = nullptr;
  int32_t num_tiles = 0;
  int32_t* tile_counter = nullptr;  // null: a cluster has one tile
};

// The same for the families that load by TMA. Boxes of q and dout have the rows of a warpgroup's
// tile or of the CTA's, boxes of k and v those of a key tile (cuda/wgmma/config.h).
struct TmaForwardParams : ForwardParams {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap k_tail;  // decoding: in smaller boxes (kTailBoxRows)
  TensorMap v_tail;
  int32_t stages = 0;                 // decoding: of each warp's pipeline; 0: all that fit
  int32_t page_box_rows = 0;          // wgmma: rows of a box inside a page
  int32_t num_tiles = 0;              // of `order`; shares of the Stream-K tail follow
  int32_t* tile_counter = nullptr;    // dynamic scheduling: tiles taken, 0 at first
  bool nan_may_leak = false;          // a band is in force
  int32_t* recompute_list = nullptr;  // wgmma/nan_recompute.h: [tiles, consumer warps], 0 at first
};

struct TmaBackwardParams : BackwardParams {
  TensorMap q;
  TensorMap dout;
  TensorMap k;
  TensorMap v;
};

}  // namespace tilewise::cuda
