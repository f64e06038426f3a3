// out = sum over the splits of exp(lse_split - lse) out_split, in an order fixed by their number.
#pragma once

#include "cuda/common/batch_splits.h"
#include "cuda/common/block.h"
#include "cuda/common/combine.h"
#include "cuda/common/places.h"
#include "cuda/common/split_weights.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

static_assert(kCombineWarps == SplitWeights::kChains);

// A block's share: one row of one head.
template <class Element>
struct Combine {
  using T = typename Element::Storage;

  const CombineParams& params;
  const Problem& p;
  Place place;
  int64_t head = 0;
  int32_t splits = 1;  // of the sequence; 1: written by the main kernel
  int64_t item = 0;    // row * heads_q + head of the partial results
  int64_t stride = 0;  // items of a split
  SplitWeights weights;

  // What is known before the main kernel is complete.
  TILEWISE_DEVICE explicit Combine(const CombineParams& of) : params(of), p(of.problem) {
    const int64_t row = ptx::block_index() / p.heads_q;
    head = ptx::block_index() - row * p.heads_q;
    place = row_place(p, row);
    if (!place.in_use) return;  // prepare clears it
    splits = params.splits;
    int64_t partial = row;
    if (params.rule.least > 0) {
      BatchSplits batch(p, params.rule);
      const Sequence s = sequence_of(p, place.batch);
      splits = batch.any() ? batch.of(params.rule, s.band.keys)
                           : static_cast<int32_t>(params.rule.parts(s.band.rows, s.band.keys));
      partial = partial_row(p, params.pitch, s, place.index);
    }
    item = partial * p.heads_q + head;
    stride = partial_rows(p, params.pitch) * p.heads_q;
  }

  // Of the lane's split among 32.
  TILEWISE_DEVICE float lse_of(int32_t begin) const {
    const int64_t split = begin + ptx::lane_index();
    return split < splits ? params.partial_lse[split * stride + item] : kMinusInfinity;
  }

  // Sets the weights; returns lse. `own` is lse_of(0).
  TILEWISE_DEVICE float merge(float own, float sink) {
    float highest = own;
#pragma unroll 1
    for (int32_t begin = ptx::kWarpSize; begin < splits; begin += ptx::kWarpSize)
      highest = max(highest, lse_of(begin));
    weights.begin(highest, sink);
    float sum = exponential(own - weights.base);
#pragma unroll 1
    for (int32_t begin = ptx::kWarpSize; begin < splits; begin += ptx::kWarpSize)
      sum += exponential(lse_of(begin) - weights.base);
    return weights.finish(sum, sink);
  }

  // Of 32 splits a warp reads every fourth one, `kWidth` columns a lane: all of these loads are on
  // their way at once.
  template <int kWidth>
  struct Parts {
    uint32_t x[ptx::kWarpSize / kCombineWarps][kWidth];
  };

  template <int kWidth>
  TILEWISE_DEVICE Parts<kWidth> load(int32_t begin, int64_t column) const {
    Parts<kWidth> parts{};
    int32_t split = begin + ptx::warp_index();
    const float* from = params.partial_out + (split * stride + item) * p.head_dim_v + column;
    const int64_t step = kCombineWarps * stride * p.head_dim_v;
#pragma unroll
    for (auto& x : parts.x) {
      if (split < splits && column < p.head_dim_v) {
        if constexpr (kWidth == 4)
          ptx::ld_global_v4_b32(x, from);
        else
          x[0] = ptx::bits_of(*from);
      }
      split += kCombineWarps;
      from += step;
    }
    return parts;
  }

  // `lse` and `parts` are those of the first 32 splits; a lane has the weight of one of them. The
  // warps' sums are added in order.
  template <int kWidth>
  TILEWISE_DEVICE void write(float lse, Parts<kWidth> parts) const {
    T* const out = static_cast<T*>(p.out.data) + place.offset(p.out) + head * p.out.stride_head;
    const int warp = ptx::warp_index();
    const SharedWords sums = shared_words(0);
#pragma unroll 1
    for (int64_t first = 0; first < p.head_dim_v; first += ptx::kWarpSize * kWidth) {
      const int64_t c = first + ptx::lane_index() * kWidth;
      float sum[kWidth] = {};
#pragma unroll 1
      for (int32_t begin = 0; begin < splits; begin += ptx::kWarpSize) {
        if (first + begin > 0) {
          lse = lse_of(begin);
          parts = load<kWidth>(begin, c);
        }
        const float mine = weights.of(lse);
        int from = warp;
#pragma unroll
        for (const auto& x : parts.x) {
          const float weight = ptx::shuffle(mine, from);
          from += kCombineWarps;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] = SplitWeights::add(sum[j], weight, x[j]);
        }
      }
      if (first > 0) ptx::sync_block();  // the columns before have been read
      for (int j = 0; j < kWidth; ++j)
        sums.set(ptx::thread_index() * kWidth + j, ptx::bits_of(sum[j]));
      ptx::sync_block();
      if (warp != 0 || c >= p.head_dim_v) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        for (int of = 1; of < kCombineWarps; ++of) {
          const int at = (of * ptx::kWarpSize + ptx::lane_index()) * kWidth + j;
          sum[j] += ptx::float_of(sums.get(at));
        }
        out[c + j] = rounded<T>(sum[j]);
      }
    }
  }

  // The first results are asked for before the weights are computed.
  template <int kWidth>
  TILEWISE_DEVICE void run() {
    const float own = lse_of(0);
    const auto parts = load<kWidth>(0, ptx::lane_index() * kWidth);
    const float lse = merge(own, p.sinks != nullptr ? p.sinks[head] : kMinusInfinity);
    if (p.lse != nullptr && ptx::thread_index() == 0)
      p.lse[place.slot * p.lse_stride_batch + place.row + head * p.lse_stride_head] = lse;
    write(own, parts);
  }
};

template <class Element>
TILEWISE_KERNEL(kCombineThreads, 1)
void combine(TILEWISE_PARAMETER CombineParams params) {
  Combine<Element> combine(params);
  ptx::griddepcontrol_wait();
  if (!combine.place.in_use || (params.rule.least > 0 && combine.splits == 1)) return;
  if (params.problem.head_dim_v % 4 == 0 && is_aligned(params.partial_out, 16))
    combine.template run<4>();
  else
    combine.template run<1>();
}

}  // namespace tilewise::cuda::common
