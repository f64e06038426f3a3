// Kernel parameters: plain data that the host compiler and the device compiler both understand.
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

// The index of row i of a sequence among `total_rows`, the order of the partial results.
TILEWISE_FN int64_t flat_row(const Problem& p, const Sequence& s, int64_t i) {
  return (p.cu_seqlens_q != nullptr ? 0 : s.batch * p.seqlen_q) + s.first_row + i;
}

// Rows of the partial results of splits: `partial_stride` per sequence or, when that is 0,
// `total_rows`.
TILEWISE_FN int64_t partial_rows(const Problem& p, int32_t partial_stride) {
  return partial_stride != 0 ? p.batch * partial_stride : total_rows(p);
}
TILEWISE_FN int64_t partial_row(const Problem& p, int32_t partial_stride, const Sequence& s,
                                int64_t i) {
  return partial_stride != 0 ? s.batch * partial_stride + i : flat_row(p, s, i);
}

// Rows padded to whole tiles per sequence: the layout of the backward's row statistics and dQ sums.
// A varlen batch needs no table: a sequence starts at its first row rounded down, plus one tile for
// every sequence before it, which leaves room for ceil(length / tile) tiles.
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
  // Where padded tile `index` of a head starts: a sequence and its row. Unused tiles have batch -1.
  struct TileStart {
    int64_t batch;
    int64_t row0;
  };
  TILEWISE_FN TileStart locate(const Problem& p, int64_t index) const {
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

// NaN recompute. A tensor core computes 0 * NaN = NaN, so a masked key of an edge tile contaminates
// rows that do not attend to it. Where that can happen, each CTA of the main kernel sets its flag
// if one of its results is not finite, and the simt family then recomputes the flagged tiles
// element by element. Some kernels flag other tiles as well: the passes with tangents in fp16,
// whose products may overflow, and the tcgen05 forward, for scores beyond the range of its
// exponents. `data` is null if no tile can need it, and for kernels that recompute such rows
// themselves (the wgmma forward).
struct Flags {
  // One per CTA of the main kernel; with chunks, one per tile comes before these.
  uint8_t* data = nullptr;
  int32_t per_tile = 1;  // flags per tile of the recompute: the splits of the main kernel
  int32_t tiles = 0;     // of the recompute, divided among its CTAs (simt/recompute_tiles.h)

  TILEWISE_FN bool any(int64_t tile) const {
    uint32_t found = 0;  // no early exit, so that no load waits for the one before
    for (int32_t i = 0; i < per_tile; ++i) found |= data[tile * per_tile + i];
    return found != 0;
  }
  // The flag of a chunk. The CTA that combines the chunks of a tile sets the tile's flag if any of
  // theirs is set.
  TILEWISE_FN uint8_t* of_chunk(int64_t chunk) const { return data + tiles + chunk; }
};

// Counts the finished chunks of a tile, so that the CTA that finishes last combines them. The
// 64-bit counter is tagged with the launch id and needs no zeroing: with any other tag it counts as
// 0. The CTA that combines resets it to 0, because a captured graph launches many times with the
// same id.
struct ChunkArrivals {
  uint64_t state;  // 44 bits launch id, 10 bits position of chunk 1, 10 bits chunks that arrived

  static constexpr int kCountBits = 10;
  // Maximum number of chunks per tile, and of positions.
  static constexpr int32_t kMaxChunks = (1 << kCountBits) - 1;

  TILEWISE_FN static constexpr uint64_t of_launch(uint64_t number) {
    return number << (2 * kCountBits);
  }
  TILEWISE_FN static constexpr bool is_of(uint64_t state, uint64_t launch) {
    return (state ^ launch) >> (2 * kCountBits) == 0;
  }
  // The summand by which chunk `index` of a tile increases the state. `position` is its number
  // among all chunks of the batch except the first ones of the sequences; a tile's chunks from 1 on
  // have consecutive numbers.
  TILEWISE_FN static constexpr uint64_t arrival(int32_t index, int32_t position) {
    return 1 + (index == 1 ? static_cast<uint64_t>(position) << kCountBits : 0);
  }
  TILEWISE_FN static constexpr int32_t arrived(uint64_t state) { return bits(state); }
  // Only valid once chunk 1 has arrived.
  TILEWISE_FN static constexpr int32_t position_of_chunk_1(uint64_t state) {
    return bits(state >> kCountBits);
  }

 private:
  TILEWISE_FN static constexpr int32_t bits(uint64_t state) {
    return static_cast<int32_t>(state & ((1u << kCountBits) - 1));
  }
};

// The mask of a problem without one. Kernels read a copy of the caller's mask, whose kind tells
// them whether there is one: Problem::mask points to memory of the host.
inline constexpr tilewise_mask kNoMask{};
TILEWISE_FN bool is_given(const tilewise_mask& mask) { return mask.kind != 0; }
inline tilewise_mask mask_of(const Problem& p) { return p.mask != nullptr ? *p.mask : kNoMask; }

// The main kernels write the rows and keys in use; the prepare kernel (common/prepare.cuh) writes
// all others.
struct ForwardParams {
  Problem problem;
  TileOrder order;
  Packing packing;         // query heads per tile: 1 or the GQA group size
  int32_t row_tile;        // packed rows of a tile
  int32_t key_tile;        // splits are cut at multiples of it
  Flags flags;             // of mma_sync and tcgen05; simt, given flags, computes only those tiles
  SplitRule split_rule;    // splits per sequence
  int32_t partial_stride;  // see `partial_row`
  // Partial results, normalised; undefined where the lse of the split is -inf.
  //   splits:   [splits, partial_rows, heads_q, head_dim_v]
  //   chunks:   [CTAs, packed_rows, head_dim_v]; if the last CTA combines them, the layout is in
  //             mma_sync/forward_chunk_combine.h
  //   Stream-K: [stream_k.num_results(), row_tile, stream_k.columns]
  float* partial_out;
  float* partial_lse;            // without the columns' dimension; the sink is not included
  ChunkSchedule chunks;          // decoding, instead of splits: a CTA has one chunk of one head
  int32_t max_keys = INT32_MAX;  // bound to which lengths are clamped
  CtaPlacement placement;        // which CTAs have a chunk
  StreamKTail stream_k;          // fast path of wgmma
  ChunkArrivals* arrivals;       // [tiles]; null: a combine kernel merges the chunks
  uint64_t launch_id;            // ChunkArrivals::of_launch
  Divisor packed_rows = 1;       // upper bound per tile, for chunks
  Divisor group = 1;             // query heads per key/value head, whether packed or not
  Divisor page_size = 1;         // of the paged forms
  uint32_t pack_reciprocal = 1u << 31;           // ceil(2^31 / packing.group)
  bool has_uniform_sequences = false;            // attention/problem.h
  bool cluster_combines = false;                 // the CTAs of a tile's splits form a cluster
  PdlTrigger pdl_trigger = PdlTrigger::at_exit;  // simt ignores it
  IndexRecord* index_record = nullptr;           // where kernels record index faults
  tilewise_mask mask = kNoMask;

  // Splits of a sequence without chunks. With one split the main kernel writes out directly.
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
  PaddedRows rows;  // CTA head * (rows.count / rows.tile) + i of the row kernels has row tile i
  Flags key_flags;  // written by the CTAs of the main kernel
  Flags row_flags;  // written by the CTAs of the finish kernel
  // Row statistics, [heads_q, rows.count], which the prepare kernel writes in the form of its
  // family. In mma_sync row_lse = -lse / ln 2 and row_delta = dlse - sum(out dout), so that dS = P
  // (dP + row_delta) with P = exp2(S / ln 2 + row_lse). Rows that are not in use or see no key have
  // -1e30 and 0, which makes their P 0.
  float* row_lse;
  float* row_delta;
  // Far rows (is_far_row) have an |lse| so large that S + row_lse would lose its low bits in fp32.
  // Their row_lse is 0; instead the kernels first subtract lse (row_origin) and its low part
  // (row_origin_low), in natural units, from the scores. Both are 0 for all other rows. Problems
  // without far rows pay nothing: *far_rows is `launch_id` only if there are some. It needs no
  // zeroing, because no other launch of the process has that id; a graph that launches again may
  // find it set, which only costs time.
  float* row_origin;
  float* row_origin_low;
  uint64_t* far_rows;
  uint64_t launch_id;
  float* dq_sum;  // [heads_q, rows.count, head-dim tile]; each family has its own order in a tile
  // Deterministic: [heads_q, rows.count / tile], the number of key tiles added to dq_sum so far.
  int32_t* dq_semaphores;
  float* dscale_partials;  // one per CTA of the finish kernel, or null
  // wgmma: `num_tiles` work tiles, with one descriptor per CTA of a cluster. A persistent grid
  // takes them by dynamic scheduling: `*tile_counter` counts the tiles taken after each cluster's
  // first.
  TileDescriptor* descriptors = nullptr;
  int32_t num_tiles = 0;
  int32_t* tile_counter = nullptr;  // null: one tile per cluster
  tilewise_mask mask = kNoMask;
};

// Adds the tensor maps of kernels that load by TMA. A box of q or dout has the rows of a
// warpgroup's tile or of the CTA's tile, a box of k or v those of a key tile (cuda/wgmma/config.h).
struct TmaForwardParams : ForwardParams {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap k_tail;  // decoding: boxes of kTailBoxRows rows
  TensorMap v_tail;
  int32_t stages = 0;                 // decoding: of each warp's pipeline; 0: as many as fit
  int32_t page_box_rows = 0;          // wgmma: rows of a box of a paged cache
  int32_t num_tiles = 0;              // of `order`, without the Stream-K tail that follows
  int32_t* tile_counter = nullptr;    // dynamic scheduling: tiles taken; starts at 0
  bool nan_may_leak = false;          // see `nan_may_leak` in plan.h
  int32_t* recompute_list = nullptr;  // [tiles, consumer warps] (wgmma/nan_recompute.h)
};

// The transposed values of float8 that the wgmma forward reads (wgmma/transposed_values.h).
struct TransposeParams {
  Problem problem;
  uint8_t* to;
};

struct TmaBackwardParams : BackwardParams {
  TensorMap q;
  TensorMap dout;
  TensorMap k;
  TensorMap v;
};

// Pass::jvp: the tiles of a forward, each with all of its keys. The kernel reads problem.out and
// problem.lse and writes tangents.out and tangents.lse, which may be null.
struct JvpParams : ForwardParams {
  Tangents tangents;
};

// Pass::second: the tiles of a backward. tangents.out, lse, dout and dlse are read.
// gradients.dout and dlse are those of the results, tangents.dout and dlse those of their tangents.
struct SecondParams : BackwardParams {
  Tangents tangents;
  // Row statistics as row_delta, which is here the delta of the tangents, dout'.out - dlse'.
  float* row_second_delta = nullptr;  // the delta of the results, dout.out + dout'.out' - dlse
  // mma_sync: -lse, or -inf for rows that are not in use or see no key, which makes their weights
  // 0; minus the low part of lse (Problem::lse_low), in units of ln 2; and lse', the tangent of
  // lse, which is the mean of the scores' tangents under the weights.
  float* row_minus_lse = nullptr;
  float* row_minus_low = nullptr;
  float* row_lse_tangent = nullptr;
};

}  // namespace tilewise::cuda
