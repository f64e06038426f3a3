// Combines the partial results of splits, chunks or Stream-K shares:
//
//   lse = log(sum over splits of exp(lse_split) + exp(sink))
//   out = sum over splits of exp(lse_split - lse) out_split
//
// in an order of sums that follows from the number of splits and of groups of warps alone.
//
// combine: a CTA combines one row of one head, of combined_rows(params). It has
// combine_groups(params) groups of kCombineWarps warps; a group reads 32 splits at a time.
// combine_by_warps: a warp combines one row of at most 32 splits; grid combine_blocks(params).
// Reads partial_out and partial_lse of the main kernel, and sinks; writes out and lse. Rows with a
// single split are written by the main kernel, rows that are not in use by the prepare kernel.
#pragma once

#include <type_traits>

#include "cuda/common/batch_chunks.h"
#include "cuda/common/block.h"
#include "cuda/common/combine.h"
#include "cuda/common/combine_weights.h"
#include "cuda/common/exact_row.h"
#include "cuda/common/row_location.h"
#include "cuda/common/trigger_dependents.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

static_assert(kCombineWarps == CombineWeights::kChains);

// Where the partial results of a row of a head lie, and where the combined row is stored. All of it
// is known before the main kernel is complete.
struct CombinedRow {
  RowLocation location{};
  int64_t head = 0;
  int32_t splits = 1;
  // The rows of split 0 and split 1 in partial_out and partial_lse, and the distance from the row
  // of each later split to the next.
  int64_t first = 0;
  int64_t second = 0;
  int64_t stride = 0;
  int64_t columns = 0;  // of a row of partial_out
  bool combines_flags = false;

  TILEWISE_DEVICE bool is_idle() const { return !location.in_use && !combines_flags; }
  TILEWISE_DEVICE int64_t result_index(int64_t split) const {
    return split == 0 ? first : second + (split - 1) * stride;
  }

  TILEWISE_DEVICE void write_lse(const Problem& p, float lse) const {
    const int64_t at =
        location.batch_index * p.lse_stride_batch + location.row + head * p.lse_stride_head;
    p.lse[at] = lse;
    if (p.lse_low != nullptr) p.lse_low[at] = 0.0f;
  }
  // Whether the lse of a split is NaN without being the marker: then the row is NaN. Called by
  // whole warps.
  TILEWISE_DEVICE bool has_nan(const ForwardParams& params) const {
    bool is_nan = false;
#pragma unroll 1
    for (int32_t split = ptx::lane_index(); split < splits; split += ptx::kWarpSize) {
      const float lse = params.partial_lse[result_index(split)];
      is_nan |= lse != lse && !is_recompute_marker(lse);
    }
    return ptx::any(is_nan);
  }
  template <class T>
  TILEWISE_DEVICE T* out(const Problem& p) const {
    return static_cast<T*>(p.out.data) + location.offset(p.out) + head * p.out.stride_head;
  }
};

// Recomputes a row whose splits must not be combined (combine_is_inexact). The call must be the
// last thing that a warp does: whatever is live across a call lies in local memory, on the usual
// path as well. (H200, 24 sequences of 8k keys, 16/1 heads: 37 us with a call that returns to more
// work, 33 us like this.) T is the element type of out; where it is float, q may have 16 bits.
template <class T>
TILEWISE_COLD void recompute_row(const ForwardParams& params, int64_t batch, int64_t row,
                                 int64_t head) {
  const Problem& p = params.problem;
  const Sequence s = sequence_of(p, batch);
  if constexpr (sizeof(T) == 4) {
    if (p.dtype == TILEWISE_FLOAT16)
      return write_exact_row<Half, Form::general>(p, params.mask, s, row, head);
    if (p.dtype == TILEWISE_BFLOAT16)
      return write_exact_row<BFloat16, Form::general>(p, params.mask, s, row, head);
  }
  write_exact_row<T, Form::general>(p, params.mask, s, row, head);
}

// A row of splits. Index: row over all sequences, head.
struct SplitRow : CombinedRow {
  TILEWISE_DEVICE SplitRow(const ForwardParams& params, int64_t index) {
    const Problem& p = params.problem;
    const int64_t row = index / p.heads_q;
    head = index - row * p.heads_q;
    location = locate_row(p, row);
    if (!location.in_use) return;  // the prepare kernel clears it
    splits = params.order.splits;
    int64_t partial = row;
    if (params.split_rule.min_keys > 0) {
      const Sequence s = sequence_of(p, location.batch);
      splits = static_cast<int32_t>(params.split_rule.splits(s.band.rows, s.band.keys));
      partial = partial_row(p, params.partial_stride, s, location.index);
      location.in_use = splits > 1;  // the main kernel has written it
    }
    stride = partial_rows(p, params.partial_stride) * p.heads_q;
    columns = p.head_dim_v;
    first = partial * p.heads_q + head;
    second = first + stride;
  }

  // Nothing to do: Flags::any tests the flags of all splits.
  TILEWISE_DEVICE void combine_flags(const ForwardParams&) const {}
};

// A row of chunks, whose partial results lie in the order of the main kernel's CTAs. Index:
// sequence, tile head, packed row of the tile.
struct ChunkRow : CombinedRow {
  int32_t tile;

  TILEWISE_DEVICE ChunkRow(const ForwardParams& params, int64_t row_index) {
    const auto index = static_cast<int32_t>(row_index);
    tile = params.packed_rows.quotient(index);
    const int32_t r = params.packed_rows.remainder(index);
    const Divisor& heads = params.order.heads;
    const int32_t sequence = heads.quotient(tile);
    columns = params.problem.head_dim_v;
    BatchChunks batch(params);
    splits = batch.count(sequence);
    if (splits == 1) return;
    const int32_t tile_head = heads.remainder(tile);
    const Sequence s = sequence_of(params.problem, sequence);
    const int32_t row = params.packing.group == 1 ? r : params.group.quotient(r);
    location = {s.batch, row, s.batch_index, s.first_row + row, row < s.band.rows, true};
    head = tile_head * params.packing.group + r - row * params.packing.group;
    stride = int64_t{heads} * params.packed_rows;
    first = index;
    second = batch.second_chunk(sequence) * stride + tile_head * int64_t{params.packed_rows} + r;
    combines_flags = r == 0 && params.flags.data != nullptr;
  }

  // Combines the flags of a tile's chunks into the flag of the tile.
  TILEWISE_DEVICE void combine_flags(const ForwardParams& params) const {
    if (!combines_flags || ptx::thread_index() != 0) return;
    uint8_t flagged = 0;
    for (int32_t split = 0; split < splits; ++split)
      flagged |= *params.flags.of_chunk(result_index(split) / params.packed_rows);
    params.flags.data[tile] = flagged;
  }
};

// A row of Stream-K shares. Index: tile of the tail, row of the tile.
struct StreamKRow : CombinedRow {
  TILEWISE_DEVICE StreamKRow(const ForwardParams& params, int64_t row_index) {
    const auto index = static_cast<int32_t>(row_index);
    const int32_t tail_tile = index / params.row_tile;
    const int32_t r = index - tail_tile * params.row_tile;
    const TileOrder::WorkTile at = params.order.at(params.stream_k.first + tail_tile);
    const Sequence s = uniform_sequence(params.problem, at.sequence);
    const int32_t row = at.tile * params.row_tile + r;
    location = {s.batch, row, s.batch_index, s.first_row + row, row < s.band.rows, true};
    head = at.head;
    splits = params.stream_k.shares_of(tail_tile);
    stride = params.row_tile;
    columns = params.stream_k.columns;
    first =
        StreamKTail::result_index(params.stream_k.first_block(tail_tile), tail_tile) * stride + r;
    second = first + stride;
  }
};

// Combines one row by a CTA. Splits 32 i to 32 i + 31 are read by group i % groups of its warps.
template <class Element, class Row>
struct Combine {
  using T = typename Element::Storage;
  static_assert(!std::is_same_v<Row, StreamKRow>, "`load` reads rows of head_dim_v columns");

  const ForwardParams& params;
  const Problem& p;
  const Row row;
  const int32_t splits;
  const int32_t groups;
  CombineWeights weights;

  TILEWISE_DEVICE explicit Combine(const ForwardParams& all)
      : params(all),
        p(all.problem),
        row(all, ptx::block_index()),
        splits(row.splits),
        groups(combine_groups(all)) {}

  // lse of split begin + lane.
  TILEWISE_DEVICE float lse_of(int32_t begin) const {
    const int64_t split = begin + ptx::lane_index();
    return split < splits ? params.partial_lse[row.result_index(split)] : kMinusInfinity;
  }

  // Reduces one value per lane over the groups of warps. `exchange` is 0 for the first call and 1
  // for the second, which use different shared memory.
  template <class Reduce>
  TILEWISE_DEVICE float reduced(float x, int exchange, const Reduce& reduce) const {
    if (groups == 1) return x;
    const SharedWords words = shared_words(exchange * kCombineGroupsBytes);
    const int lane = ptx::lane_index();
    if (warp_of_group() == 0) words.set(first_split() + lane, ptx::bits_of(x));
    ptx::sync_block();
    float all = ptx::float_of(words.get(lane));
#pragma unroll
    for (int group = 1; group < kCombineGroups; ++group)
      all = reduce(all, ptx::float_of(words.get(group * ptx::kWarpSize + lane)));
    return all;
  }

  // Sets the weights and returns the lse of the row. `lane_lse`: that of the lane's first split.
  TILEWISE_DEVICE float set_weights(float lane_lse, float sink) {
    const int32_t next = first_split() + splits_per_pass();
    float highest = lane_lse;
#pragma unroll 1
    for (int32_t begin = next; begin < splits; begin += splits_per_pass())
      highest = max(highest, lse_of(begin));
    weights.begin(reduced(highest, 0, [](float a, float b) { return max(a, b); }), sink);
    float sum = exponential(lane_lse - weights.base);
#pragma unroll 1
    for (int32_t begin = next; begin < splits; begin += splits_per_pass())
      sum += exponential(lse_of(begin) - weights.base);
    return weights.finish(reduced(sum, 1, [](float a, float b) { return a + b; }), sink);
  }

  // A warp of a group reads every fourth one of 32 splits, kWidth columns per lane. All of these
  // loads are in flight at the same time.
  template <int kWidth>
  struct PartialOutputs {
    uint32_t x[ptx::kWarpSize / kCombineWarps][kWidth];
  };

  template <int kWidth>
  TILEWISE_DEVICE PartialOutputs<kWidth> load(int32_t begin, int64_t column) const {
    PartialOutputs<kWidth> partial{};
    int32_t split = begin + warp_of_group();
    const float* const first = params.partial_out + row.first * p.head_dim_v + column;
    const float* from =
        params.partial_out + (row.second + (split - 1) * row.stride) * p.head_dim_v + column;
    const int64_t step = kCombineWarps * row.stride * p.head_dim_v;
#pragma unroll
    for (auto& x : partial.x) {
      if (split < splits && column < p.head_dim_v) {
        const float* const at = split == 0 ? first : from;
        if constexpr (kWidth == 4)
          ptx::ld_global_v4_b32(x, at);
        else
          x[0] = ptx::bits_of(*at);
      }
      split += kCombineWarps;
      from += step;
    }
    return partial;
  }

  // `lse` and `partial` belong to the group's first 32 splits; a lane holds the weight of one of
  // them. The sums of the warps are added in the order of the warps.
  template <int kWidth>
  TILEWISE_DEVICE void write(float lse, PartialOutputs<kWidth> partial) const {
    constexpr int kColumns = ptx::kWarpSize * kWidth;  // at a time
    T* const out = row.template out<T>(p);
    const SharedWords sums = shared_words(2 * kCombineGroupsBytes);
    const int thread = ptx::thread_index();
#pragma unroll 1
    for (int64_t first = 0; first < p.head_dim_v; first += kColumns) {
      float sum[kWidth] = {};
#pragma unroll 1
      for (int32_t begin = first_split(); begin < splits; begin += splits_per_pass()) {
        if (first > 0 || begin > first_split()) {
          lse = lse_of(begin);
          partial = load<kWidth>(begin, first + ptx::lane_index() * kWidth);
        }
        const float lane_weight = weights.of(lse);
        int from = warp_of_group();
#pragma unroll
        for (const auto& x : partial.x) {
          const float weight = ptx::shuffle(lane_weight, from);
          from += kCombineWarps;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] = CombineWeights::add(sum[j], weight, x[j]);
        }
      }
      if (first > 0) ptx::sync_block();  // the sums of the previous columns have been read
      for (int j = 0; j < kWidth; ++j) sums.set(thread * kWidth + j, ptx::bits_of(sum[j]));
      ptx::sync_block();
      if (thread >= kColumns || first + thread >= p.head_dim_v) continue;
      float all = ptx::float_of(sums.get(thread));
#pragma unroll 3
      for (int warp = 1; warp < groups * kCombineWarps; ++warp)
        all += ptx::float_of(sums.get(warp * kColumns + thread));
      out[first + thread] = rounded<T>(all);
    }
  }

  // The first partial outputs are loaded before the weights are computed.
  template <int kWidth>
  TILEWISE_DEVICE void run() {
    const float lane_lse = lse_of(first_split());
    const auto partial = load<kWidth>(first_split(), ptx::lane_index() * kWidth);
    const float lse =
        set_weights(lane_lse, p.sinks != nullptr ? p.sinks[row.head] : kMinusInfinity);
    if (combine_is_inexact<Element>(lse) && !row.has_nan(params)) [[unlikely]] {
      // All warps have the same lse, and all of them write the whole row.
      return recompute_row<T>(params, row.location.batch, row.location.index, row.head);
    }
    if (p.lse != nullptr && ptx::thread_index() == 0) row.write_lse(p, lse);
    write(lane_lse, partial);
  }

  TILEWISE_DEVICE static int warp_of_group() { return ptx::warp_index() % kCombineWarps; }
  // The first of the 32 splits that the group begins with.
  TILEWISE_DEVICE static int32_t first_split() {
    return ptx::warp_index() / kCombineWarps * ptx::kWarpSize;
  }
  TILEWISE_DEVICE int32_t splits_per_pass() const { return groups * ptx::kWarpSize; }
};

template <class Element, class Row>
TILEWISE_KERNEL(kCombineGroups* kCombineThreads, 1)
void combine(TILEWISE_PARAMETER ForwardParams params) {
  Combine<Element, Row> combine(params);
  // CTA 0 always waits, so that this kernel is not complete before the main kernel is.
  if (combine.row.is_idle() && ptx::block_index() != 0) return;
  ptx::griddepcontrol_wait();
  trigger_dependents(params, PdlTrigger::after_first_loads);
  combine.row.combine_flags(params);
  if (!combine.row.location.in_use) return;
  if (params.problem.head_dim_v % 4 == 0 && is_aligned(params.partial_out, 16))
    combine.template run<4>();
  else
    combine.template run<1>();
}

// Combines one row by a warp, in a launch with many rows of at most 32 splits. The number of
// columns is a multiple of 4.
template <class Element, class Row>
struct CombineByWarps {
  using T = typename Element::Storage;
  static constexpr int kWidth = 4;  // columns of a lane
  static constexpr int kChains = CombineWeights::kChains;

  const ForwardParams& params;
  const Problem& p;
  const Row row;

  TILEWISE_DEVICE void run() const {
    const float sink = p.sinks != nullptr ? p.sinks[row.head] : kMinusInfinity;
    const int lane = ptx::lane_index();
    const float lane_lse =
        lane < row.splits ? params.partial_lse[row.result_index(lane)] : kMinusInfinity;
    CombineWeights weights;
    weights.begin(lane_lse, sink);
    const float lse = weights.finish(exponential(lane_lse - weights.base), sink);
    if (combine_is_inexact<Element>(lse) && !row.has_nan(params)) [[unlikely]]
      return recompute_row<T>(params, row.location.batch, row.location.index, row.head);
    if (p.lse != nullptr && lane == 0) row.write_lse(p, lse);
    const float weight = weights.of(lane_lse);
#pragma unroll 1
    for (int64_t c = 0; c < p.head_dim_v; c += ptx::kWarpSize * kWidth)
      write(c + lane * kWidth, weight);
  }

  // `weight` is that of split `lane`.
  TILEWISE_DEVICE void write(int64_t c, float weight) const {
    const bool exists = c < p.head_dim_v;
    float sum[kChains][kWidth] = {};
#pragma unroll 1
    for (int32_t begin = 0; begin < row.splits; begin += kChains) {
      uint32_t x[kChains][kWidth] = {};
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        if (!exists || begin + i >= row.splits) continue;
        ptx::ld_global_v4_b32(x[i],
                              params.partial_out + row.result_index(begin + i) * row.columns + c);
      }
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        const float split_weight = ptx::shuffle(weight, begin + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          sum[i][j] = CombineWeights::add(sum[i][j], split_weight, x[i][j]);
      }
    }
    if (!exists) return;
    T* const out = row.template out<T>(p) + c;
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      out[j] = rounded<T>(sum[0][j] + sum[1][j] + sum[2][j] + sum[3][j]);
  }
};

template <class Element, class Row>
TILEWISE_KERNEL(kCombineByWarpsThreads, 1)
void combine_by_warps(TILEWISE_PARAMETER ForwardParams params) {
  const int64_t index = ptx::block_index() * kCombineRowsPerBlock + ptx::warp_index();
  if (index >= combined_rows(params)) return;
  const CombineByWarps<Element, Row> combine{params, params.problem, Row(params, index)};
  ptx::griddepcontrol_wait();
  trigger_dependents(params, PdlTrigger::after_first_loads);
  if (combine.row.location.in_use) combine.run();
}

}  // namespace tilewise::cuda::common
