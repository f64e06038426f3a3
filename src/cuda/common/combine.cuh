// out = sum over the splits of exp(lse_split - lse) out_split, in ascending order.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
#include "cuda/common/combine.h"
#include "cuda/common/places.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// A warp's share: one row of one head.
template <class Element>
struct Combine {
  using T = typename Element::Storage;

  const CombineParams& params;
  const Problem& p;
  int64_t item;    // row * heads_q + head of all rows
  int64_t stride;  // items of a split
  float base = 0.0f;
  float inverse = 0.0f;

  TILEWISE_DEVICE float lse_of(int64_t split) const {
    return params.partial_lse[split * stride + item];
  }

  // Sets the weights' base and denominator; returns lse.
  TILEWISE_DEVICE float merge(float sink) {
    float highest = kMinusInfinity;
    for (int64_t split = ptx::lane_index(); split < params.splits; split += ptx::kWarpSize)
      highest = max(highest, lse_of(split));
    base = exponent_base(max(max_of_warp(highest), sink));
    float sum = 0.0f;
    for (int64_t split = ptx::lane_index(); split < params.splits; split += ptx::kWarpSize)
      sum += exponential(lse_of(split) - base);
    sum = sum_of_warp(sum) + exponential(sink - base);
    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return sum == 0.0f ? kMinusInfinity : base + ptx::log_accurate(sum);
  }

  template <int kWidth>
  TILEWISE_DEVICE void write(T* out) const {
    for (int64_t c = ptx::lane_index() * kWidth; c < p.head_dim_v; c += ptx::kWarpSize * kWidth) {
      float sum[kWidth] = {};
      for (int64_t split = 0; split < params.splits; ++split) {
        const float lse = lse_of(split);
        if (lse == kMinusInfinity) continue;  // saw nothing, wrote nothing
        const float weight = exponential(lse - base) * inverse;
        const float* const part = params.partial_out + (split * stride + item) * p.head_dim_v + c;
        uint32_t x[4];
        if constexpr (kWidth == 4)
          ptx::ld_global_v4_b32(x, part);
        else
          x[0] = ptx::bits_of(part[0]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = ptx::fma(weight, ptx::float_of(x[i]), sum[i]);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[c + i] = from_float<T>(sum[i]);
    }
  }

  TILEWISE_DEVICE void run() {
    const int64_t row = item / p.heads_q;
    const int64_t head = item - row * p.heads_q;
    const Place place = row_place(p, row);
    if (!place.in_use) return;  // prepare clears it
    const float lse = merge(p.sinks != nullptr ? p.sinks[head] : kMinusInfinity);
    if (p.lse != nullptr && ptx::lane_index() == 0)
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
  const Problem& p = params.problem;
  const int64_t items = total_rows(p) * p.heads_q;
  const int64_t item = ptx::block_index() * (kCombineThreads / ptx::kWarpSize) + ptx::warp_index();
  if (item >= items) return;
  Combine<Element> combine{params, p, item, items};
  combine.run();
}

}  // namespace tilewise::cuda::common
