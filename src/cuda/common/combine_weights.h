// The weights of a row's partial results when its splits are combined. The order of the sums is
// part of the contract: the combine kernel and the combine in a cluster return the same bits.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"

namespace tilewise::cuda::common {

// A row whose sum of weights overflowed or lost its precision must be recomputed (needs_recompute
// in forward_results.h). Its lse, or the lse of its split, is then this particular NaN; any other
// NaN is a result and is kept.
TILEWISE_DEVICE float recompute_marker() { return ptx::float_of(0x7fc0105eu); }
TILEWISE_DEVICE bool is_recompute_marker(float lse) { return ptx::bits_of(lse) == 0x7fc0105eu; }

// Whether combining the splits of a row, which has resulted in this lse, is not exact enough: lse
// is NaN because that of a split is, or |lse| is so large that its rounding to fp32 changes weights
// by more than 1e-4 (16-bit elements) or 2e-5 (fp32).
template <class Element>
TILEWISE_DEVICE bool combine_is_inexact(float lse) {
  constexpr float kMaxLse = Element::kBytes == 2 ? 0x1p11f : 0x1p8f;
  return lse != kMinusInfinity && !(__builtin_fabsf(lse) <= kMaxLse);
}

// The weights of a row's splits, computed by a warp. Outputs are summed in kChains sums, each over
// every kChains-th split, which are then added from the first to the last.
struct CombineWeights {
  static constexpr int kChains = 4;
  // Marks a split that saw no key: its output is not read, because it may be NaN.
  static constexpr float kNoWeight = -1.0f;

  float base = 0.0f;     // the largest lse of a split, or the sink
  float inverse = 0.0f;  // 1 / (the sum of exp(lse - base) over all splits and the sink)

  // `highest`: the maximum of the lse values that this lane holds.
  TILEWISE_DEVICE void begin(float highest, float sink) {
    base = exponent_base(max(max_of_warp(highest), sink));
  }
  // `sum`: over this lane's splits, of exponential(lse - base). Returns the lse of the row.
  TILEWISE_DEVICE float finish(float sum, float sink) {
    sum = sum_of_warp(sum) + exponential(above(sink, base));
    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return sum == 0.0f ? kMinusInfinity : base + ptx::log_accurate(sum);
  }
  // The weight of the split with this lse.
  TILEWISE_DEVICE float of(float lse) const {
    return lse == kMinusInfinity ? kNoWeight : exponential(lse - base) * inverse;
  }
  TILEWISE_DEVICE static float add(float sum, float weight, uint32_t x) {
    const float value = weight != kNoWeight ? ptx::float_of(x) : 0.0f;
    return ptx::fma(weight, value, sum);
  }
};

}  // namespace tilewise::cuda::common
