// What the partial results of a row's splits weigh: the order of sums is part of the meaning, so
// that a second kernel and a cluster get the same bits.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"

namespace tilewise::cuda::common {

// The lse of a split, or of a row, whose sums its kernel could not tell: the row is computed again
// as a whole. A NaN of its own: any other one is the result.
TILEWISE_DEVICE float lost_lse() { return ptx::float_of(0x7fc0105eu); }
TILEWISE_DEVICE bool is_lost_lse(float lse) { return ptx::bits_of(lse) == 0x7fc0105eu; }

// Whether splits cannot be merged by lse, of which the whole is `lse`: some are lost, or fp32 has
// no room for what they weigh beside each other (1e-4 of a weight of 16 bits, 2e-5 in fp32).
template <class Element>
TILEWISE_DEVICE bool combine_is_inexact(float lse) {
  constexpr float kMost = Element::kBytes == 2 ? 0x1p11f : 0x1p8f;
  return lse != kMinusInfinity && !(__builtin_fabsf(lse) <= kMost);
}

// By a warp. The splits' outputs are summed in `kChains` chains of every kChains-th split, and
// those from the first to the last.
struct CombineWeights {
  static constexpr int kChains = 4;
  // Of a split that saw nothing: its result may be NaN.
  static constexpr float kNoWeight = -1.0f;

  float base = 0.0f;
  float inverse = 0.0f;

  // `highest` of the lane's lse.
  TILEWISE_DEVICE void begin(float highest, float sink) {
    base = exponent_base(max(max_of_warp(highest), sink));
  }
  // `sum` of the lane's exponential(lse - base); returns lse of the row.
  TILEWISE_DEVICE float finish(float sum, float sink) {
    sum = sum_of_warp(sum) + exponential(above(sink, base));
    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return sum == 0.0f ? kMinusInfinity : base + ptx::log_accurate(sum);
  }
  TILEWISE_DEVICE float of(float lse) const {
    return lse == kMinusInfinity ? kNoWeight : exponential(lse - base) * inverse;
  }
  TILEWISE_DEVICE static float add(float sum, float weight, uint32_t x) {
    const float value = weight != kNoWeight ? ptx::float_of(x) : 0.0f;
    return ptx::fma(weight, value, sum);
  }
};

}  // namespace tilewise::cuda::common
