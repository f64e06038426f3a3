// out = sum over the splits of exp(lse_split - lse) out_split, in an order fixed by their number.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
#include "cuda/common/combine.h"
#include "cuda/common/places.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// A block's share: one row of one head.
template <class Element>
struct Combine {
  using T = typename Element::Storage;

  const CombineParams& params;
  const Problem& p;
  int32_t splits;  // of the sequence
  int64_t item;    // row * heads_q + head of the partial results
  int64_t stride;  // items of a split
  float base = 0.0f;
  float inverse = 0.0f;

  TILEWISE_DEVICE float lse_of(int64_t split) const {
    return params.partial_lse[split * stride + item];
  }

  // Sets the weights' base and denominator; returns lse.
  TILEWISE_DEVICE float merge(float sink) {
    float highest = kMinusInfinity;
    for (int64_t split = ptx::lane_index(); split < splits; split += ptx::kWarpSize)
      highest = max(highest, lse_of(split));
    base = exponent_base(max(max_of_warp(highest), sink));
    float sum = 0.0f;
    for (int64_t split = ptx::lane_index(); split < splits; split += ptx::kWarpSize)
      sum += exponential(lse_of(split) - base);
    sum = sum_of_warp(sum) + exponential(sink - base);
    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return sum == 0.0f ? kMinusInfinity : base + ptx::log_accurate(sum);
  }

  // Of a split that saw nothing and wrote nothing.
  static constexpr float kNoWeight = -1.0f;

  TILEWISE_DEVICE float weight_of(int64_t split) const {
    if (split >= splits) return kNoWeight;
    const float lse = lse_of(split);
    return lse == kMinusInfinity ? kNoWeight : exponential(lse - base) * inverse;
  }

  template <int kWidth>
  TILEWISE_DEVICE static void load(uint32_t (&x)[kWidth], const float* from) {
    if constexpr (kWidth == 4)
      ptx::ld_global_v4_b32(x, from);
    else
      x[0] = ptx::bits_of(*from);
  }

  // A lane has the weight of one of 32 splits, and a warp reads every fourth of them: all of its
  // loads are on their way at once. Then the warps' sums are added in order.
  template <int kWidth>
  TILEWISE_DEVICE void write(T* out) const {
    const int warp = ptx::warp_index();
    const SharedWords sums = shared_words(0);
    const int64_t step = kCombineWarps * stride * p.head_dim_v;
    for (int64_t first = 0; first < p.head_dim_v; first += ptx::kWarpSize * kWidth) {
      const int64_t c = first + ptx::lane_index() * kWidth;
      const bool valid = c < p.head_dim_v;
      float sum[kWidth] = {};
      for (int32_t begin = 0; begin < splits; begin += ptx::kWarpSize) {
        const float mine = weight_of(begin + ptx::lane_index());
        const float* part =
            params.partial_out + ((begin + warp) * stride + item) * p.head_dim_v + c;
#pragma unroll
        for (int i = 0; i < ptx::kWarpSize / kCombineWarps; ++i, part += step) {
          const float weight = ptx::shuffle(mine, warp + i * kCombineWarps);
          uint32_t x[kWidth] = {};
          if (valid && weight != kNoWeight) load(x, part);
          const float factor = weight != kNoWeight ? weight : 0.0f;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] = ptx::fma(factor, ptx::float_of(x[j]), sum[j]);
        }
      }
      if (first > 0) ptx::sync_block();  // the columns before have been read
      for (int j = 0; j < kWidth; ++j)
        sums.set(ptx::thread_index() * kWidth + j, ptx::bits_of(sum[j]));
      ptx::sync_block();
      if (warp != 0 || !valid) continue;
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

  TILEWISE_DEVICE void run(const Place& place, int64_t head) {
    const float lse = merge(p.sinks != nullptr ? p.sinks[head] : kMinusInfinity);
    if (p.lse != nullptr && ptx::thread_index() == 0)
      p.lse[place.slot * p.lse_stride_batch + place.row + head * p.lse_stride_head] = lse;
    T* const out = static_cast<T*>(p.out.data) + place.offset(p.out) + head * p.out.stride_head;
    if (p.head_dim_v % 4 == 0 && is_aligned(params.partial_out, 16))
      write<4>(out);
    else
      write<1>(out);
  }
};

template <class Element>
TILEWISE_KERNEL(kCombineThreads, 1)
void combine(TILEWISE_PARAMETER CombineParams params) {
  ptx::griddepcontrol_wait();
  const Problem& p = params.problem;
  const int64_t item = ptx::block_index();
  const int64_t row = item / p.heads_q;
  const Place place = row_place(p, row);
  if (!place.in_use) return;  // prepare clears it
  int32_t splits = params.splits;
  int64_t partial = row;
  if (params.rule.least > 0) {
    const Sequence s = sequence_of(p, place.batch);
    splits = static_cast<int32_t>(params.rule.parts(s.band.rows, s.band.keys));
    if (splits == 1) return;  // written by the main kernel
    partial = partial_row(p, params.pitch, s, place.index);
  }
  const int64_t head = item - row * p.heads_q;
  Combine<Element> combine{params, p, splits, partial * p.heads_q + head,
                           partial_rows(p, params.pitch) * p.heads_q};
  combine.run(place, head);
}

}  // namespace tilewise::cuda::common
