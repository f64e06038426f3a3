// out = sum over the splits of exp(lse_split - lse) out_split, in an order fixed by their number.
#pragma once

#include "cuda/common/batch_chunks.h"
#include "cuda/common/block.h"
#include "cuda/common/combine.h"
#include "cuda/common/exact_row.h"
#include "cuda/common/trigger_dependents.h"
#include "cuda/common/places.h"
#include "cuda/common/split_weights.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

static_assert(kCombineWarps == SplitWeights::kChains);

// Where a row of a head comes from and goes to, which is known before the main kernel is
// complete.
struct CombinedRow {
  Place place{};
  int64_t head = 0;
  int32_t splits = 1;
  // Of the partial results: rows of split 0 and of split 1, and from there to the next ones.
  int64_t first = 0;
  int64_t second = 0;
  int64_t stride = 0;
  int64_t columns = 0;
  bool joins = false;  // flags

  TILEWISE_DEVICE bool is_done() const { return !place.in_use && !joins; }
  TILEWISE_DEVICE int64_t item(int64_t split) const {
    return split == 0 ? first : second + (split - 1) * stride;
  }

  TILEWISE_DEVICE void write_lse(const Problem& p, float lse) const {
    const int64_t at = place.slot * p.lse_stride_batch + place.row + head * p.lse_stride_head;
    p.lse[at] = lse;
    if (p.lse_low != nullptr) p.lse_low[at] = 0.0f;
  }
  // By a warp, of a row whose splits are beyond merging: computes it again, unless it is NaN, as a
  // split says.
  template <class T>
  TILEWISE_COLD bool compute_again(const ForwardParams& params) const {
    bool is_nan = false;
    for (int32_t split = ptx::lane_index(); split < splits; split += ptx::kWarpSize) {
      const float lse = params.partial_lse[item(split)];
      is_nan |= lse != lse && !is_lost_lse(lse);
    }
    if (ptx::any(is_nan)) return false;
    const Problem& p = params.problem;
    const Sequence s = sequence_of(p, place.batch);
    write_exact_row<T, Form::general, static_cast<int>(kMaxHeadDim)>(p, s, place.index, head);
    return true;
  }
  template <class T>
  TILEWISE_DEVICE T* out(const Problem& p) const {
    return static_cast<T*>(p.out.data) + place.offset(p.out) + head * p.out.stride_head;
  }
};

// Key splits: by rows of all sequences, and heads.
struct SplitRow : CombinedRow {
  TILEWISE_DEVICE SplitRow(const ForwardParams& params, int64_t index) {
    const Problem& p = params.problem;
    const int64_t row = index / p.heads_q;
    head = index - row * p.heads_q;
    place = row_place(p, row);
    if (!place.in_use) return;  // prepare clears it
    splits = params.order.splits;
    int64_t partial = row;
    if (params.split_rule.min_keys > 0) {
      const Sequence s = sequence_of(p, place.batch);
      splits = static_cast<int32_t>(params.split_rule.splits(s.band.rows, s.band.keys));
      partial = partial_row(p, params.partial_stride, s, place.index);
      place.in_use = splits > 1;  // the main kernel has written it
    }
    stride = partial_rows(p, params.partial_stride) * p.heads_q;
    columns = p.head_dim_v;
    first = partial * p.heads_q + head;
    second = first + stride;
  }

  TILEWISE_DEVICE void join_flags(const ForwardParams&) const {}  // Flags::any does
};

// Equal parts, which lie in the order of the main kernel's blocks: by sequences, heads of a tile,
// and its rows.
struct ChunkRow : CombinedRow {
  int32_t tile;

  TILEWISE_DEVICE ChunkRow(const ForwardParams& params, int64_t of) {
    const auto index = static_cast<int32_t>(of);
    tile = params.packed_rows.quotient(index);
    const int32_t r = params.packed_rows.remainder(index);
    const Divisor& heads = params.order.heads;
    const int32_t sequence = heads.quotient(tile);
    BatchChunks batch(params);
    splits = batch.count(sequence);
    if (splits == 1) return;
    const int32_t tile_head = heads.remainder(tile);
    const Sequence s = sequence_of(params.problem, sequence);
    const int32_t row = params.packing.group == 1 ? r : params.group.quotient(r);
    place = {s.batch, row, s.batch_index, s.first_row + row, row < s.band.rows, true};
    head = tile_head * params.packing.group + r - row * params.packing.group;
    stride = int64_t{heads} * params.packed_rows;
    first = index;
    second = batch.second(sequence) * stride + tile_head * int64_t{params.packed_rows} + r;
    joins = r == 0 && params.flags.data != nullptr;
  }

  // The flags of the blocks of a tile become one.
  TILEWISE_DEVICE void join_flags(const ForwardParams& params) const {
    if (!joins || ptx::thread_index() != 0) return;
    uint8_t flagged = 0;
    for (int32_t split = 0; split < splits; ++split)
      flagged |= *params.flags.of_chunk(item(split) / params.packed_rows);
    params.flags.data[tile] = flagged;
  }
};

// Parts of shared works: rows of their tiles.
struct SharedRow : CombinedRow {
  TILEWISE_DEVICE SharedRow(const ForwardParams& params, int64_t of) {
    const auto index = static_cast<int32_t>(of);
    const int32_t work = index / params.row_tile;
    const int32_t r = index - work * params.row_tile;
    const TileOrder::WorkTile at = params.order.at(params.stream_k.first + work);
    const Sequence s = uniform_sequence(params.problem, at.sequence);
    const int32_t row = at.tile * params.row_tile + r;
    place = {s.batch, row, s.batch_index, s.first_row + row, row < s.band.rows, true};
    head = at.head;
    splits = params.stream_k.shares_of(work);
    stride = params.row_tile;
    columns = params.stream_k.columns;
    first = StreamKTail::result_index(params.stream_k.first_block(work), work) * stride + r;
    second = first + stride;
  }
};

// A row by a block: of each 32 splits by another group of warps.
template <class Element, class Row>
struct Combine {
  using T = typename Element::Storage;

  const ForwardParams& params;
  const Problem& p;
  const Row row;
  const int32_t splits;
  const int32_t groups;
  SplitWeights weights;

  TILEWISE_DEVICE explicit Combine(const ForwardParams& of)
      : params(of),
        p(of.problem),
        row(of, ptx::block_index()),
        splits(row.splits),
        groups(combine_groups(of)) {}

  // Of the lane's split among the 32 from `begin` on.
  TILEWISE_DEVICE float lse_of(int32_t begin) const {
    const int64_t split = begin + ptx::lane_index();
    return split < splits ? params.partial_lse[row.item(split)] : kMinusInfinity;
  }

  // Of what the groups have, one for each lane; `place` is another one each time.
  template <class Join>
  TILEWISE_DEVICE float joined(float own, int place, const Join& join) const {
    if (groups == 1) return own;
    const SharedWords words = shared_words(place * kCombineGroupsBytes);
    const int lane = ptx::lane_index();
    if (chain() == 0) words.set(own_splits() + lane, ptx::bits_of(own));
    ptx::sync_block();
    float all = ptx::float_of(words.get(lane));
#pragma unroll
    for (int group = 1; group < kCombineGroups; ++group)
      all = join(all, ptx::float_of(words.get(group * ptx::kWarpSize + lane)));
    return all;
  }

  // Sets the weights; returns lse. `own` is the lane's of the group's first 32.
  TILEWISE_DEVICE float merge(float own, float sink) {
    const int32_t next = own_splits() + splits_at_once();
    float highest = own;
#pragma unroll 1
    for (int32_t begin = next; begin < splits; begin += splits_at_once())
      highest = max(highest, lse_of(begin));
    weights.begin(joined(highest, 0, [](float a, float b) { return max(a, b); }), sink);
    float sum = exponential(own - weights.base);
#pragma unroll 1
    for (int32_t begin = next; begin < splits; begin += splits_at_once())
      sum += exponential(lse_of(begin) - weights.base);
    return weights.finish(joined(sum, 1, [](float a, float b) { return a + b; }), sink);
  }

  // Of 32 splits a warp of a group reads every fourth one, `kWidth` columns a lane: all of these
  // loads are on their way at once.
  template <int kWidth>
  struct Parts {
    uint32_t x[ptx::kWarpSize / kCombineWarps][kWidth];
  };

  template <int kWidth>
  TILEWISE_DEVICE Parts<kWidth> load(int32_t begin, int64_t column) const {
    Parts<kWidth> parts{};
    int32_t split = begin + chain();
    const float* const first = params.partial_out + row.first * p.head_dim_v + column;
    const float* from =
        params.partial_out + (row.second + (split - 1) * row.stride) * p.head_dim_v + column;
    const int64_t step = kCombineWarps * row.stride * p.head_dim_v;
#pragma unroll
    for (auto& x : parts.x) {
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
    return parts;
  }

  // `lse` and `parts` are those of the group's first 32 splits; a lane has the weight of one of
  // them. The warps' sums are added in order.
  template <int kWidth>
  TILEWISE_DEVICE void write(float lse, Parts<kWidth> parts) const {
    constexpr int kColumns = ptx::kWarpSize * kWidth;  // at once
    T* const out = row.template out<T>(p);
    const SharedWords sums = shared_words(2 * kCombineGroupsBytes);
    const int thread = ptx::thread_index();
#pragma unroll 1
    for (int64_t first = 0; first < p.head_dim_v; first += kColumns) {
      float sum[kWidth] = {};
#pragma unroll 1
      for (int32_t begin = own_splits(); begin < splits; begin += splits_at_once()) {
        if (first > 0 || begin > own_splits()) {
          lse = lse_of(begin);
          parts = load<kWidth>(begin, first + ptx::lane_index() * kWidth);
        }
        const float mine = weights.of(lse);
        int from = chain();
#pragma unroll
        for (const auto& x : parts.x) {
          const float weight = ptx::shuffle(mine, from);
          from += kCombineWarps;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] = SplitWeights::add(sum[j], weight, x[j]);
        }
      }
      if (first > 0) ptx::sync_block();  // the columns before have been read
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

  // The first results are asked for before the weights are computed.
  template <int kWidth>
  TILEWISE_DEVICE void run() {
    const float own = lse_of(own_splits());
    const auto parts = load<kWidth>(own_splits(), ptx::lane_index() * kWidth);
    const float lse = merge(own, p.sinks != nullptr ? p.sinks[row.head] : kMinusInfinity);
    if (is_beyond_merging<Element>(lse)) [[unlikely]] {  // all warps agree, and write the same
      if (row.template compute_again<T>(params)) return;
    }
    if (p.lse != nullptr && ptx::thread_index() == 0) row.write_lse(p, lse);
    write(own, parts);
  }

  TILEWISE_DEVICE static int chain() { return ptx::warp_index() % kCombineWarps; }
  // The first of the 32 that the group begins with.
  TILEWISE_DEVICE static int32_t own_splits() {
    return ptx::warp_index() / kCombineWarps * ptx::kWarpSize;
  }
  TILEWISE_DEVICE int32_t splits_at_once() const { return groups * ptx::kWarpSize; }
};

template <class Element, class Row>
TILEWISE_KERNEL(kCombineGroups* kCombineThreads, 1)
void combine(TILEWISE_PARAMETER ForwardParams params) {
  Combine<Element, Row> combine(params);
  // One block is left to wait: this kernel must not be complete before the main one.
  if (combine.row.is_done() && ptx::block_index() != 0) return;
  ptx::griddepcontrol_wait();
  trigger_dependents(params, PdlTrigger::after_first_loads);
  combine.row.join_flags(params);
  if (!combine.row.place.in_use) return;
  if (params.problem.head_dim_v % 4 == 0 && is_aligned(params.partial_out, 16))
    combine.template run<4>();
  else
    combine.template run<1>();
}

// A row by a warp: of few parts, and many rows. Columns are a multiple of four.
template <class Element, class Row>
struct CombineByWarps {
  using T = typename Element::Storage;
  static constexpr int kWidth = 4;  // columns of a lane
  static constexpr int kChains = SplitWeights::kChains;

  const ForwardParams& params;
  const Problem& p;
  const Row row;

  TILEWISE_DEVICE void run() const {
    const float sink = p.sinks != nullptr ? p.sinks[row.head] : kMinusInfinity;
    const int lane = ptx::lane_index();
    const float own = lane < row.splits ? params.partial_lse[row.item(lane)] : kMinusInfinity;
    SplitWeights weights;
    weights.begin(own, sink);
    const float lse = weights.finish(exponential(own - weights.base), sink);
    if (is_beyond_merging<Element>(lse)) [[unlikely]] {
      if (row.template compute_again<T>(params)) return;
    }
    if (p.lse != nullptr && lane == 0) row.write_lse(p, lse);
    const float weight = weights.of(own);
#pragma unroll 1
    for (int64_t c = 0; c < p.head_dim_v; c += ptx::kWarpSize * kWidth)
      write(c + lane * kWidth, weight);
  }

  // `weight` is that of part `lane`.
  TILEWISE_DEVICE void write(int64_t c, float weight) const {
    const bool exists = c < p.head_dim_v;
    float sum[kChains][kWidth] = {};
#pragma unroll 1
    for (int32_t begin = 0; begin < row.splits; begin += kChains) {
      uint32_t x[kChains][kWidth] = {};
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        if (!exists || begin + i >= row.splits) continue;
        ptx::ld_global_v4_b32(x[i], params.partial_out + row.item(begin + i) * row.columns + c);
      }
#pragma unroll
      for (int i = 0; i < kChains; ++i) {
        const float its = ptx::shuffle(weight, begin + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[i][j] = SplitWeights::add(sum[i][j], its, x[i][j]);
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
  const int64_t index = ptx::block_index() * kRowsOfCombine + ptx::warp_index();
  if (index >= combined_rows(params)) return;
  const CombineByWarps<Element, Row> combine{params, params.problem, Row(params, index)};
  ptx::griddepcontrol_wait();
  trigger_dependents(params, PdlTrigger::after_first_loads);
  if (combine.row.place.in_use) combine.run();
}

}  // namespace tilewise::cuda::common
