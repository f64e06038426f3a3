// What the partial results of a row's splits weigh: the order of sums is part of the meaning, so
// that a second kernel and a cluster get the same bits.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"

namespace tilewise::cuda::common {

// Whether the low part of an lse shows in the weights that follow from it: beyond 2^8 rounding it
// to fp32 costs more than 1e-5 of a weight.
TILEWISE_DEVICE bool needs_low(float lse) { return __builtin_fabsf(lse) > 0x1p8f; }

// By a warp. The splits' outputs are summed in `kChains` chains of every kChains-th split, and
// those from the first to the last.
struct SplitWeights {
  static constexpr int kChains = 4;
  // Of a split that saw nothing: its result may be NaN.
  static constexpr float kNoWeight = -1.0f;

  LogSum base{0.0f, 0.0f};
  float inverse = 0.0f;

  // `highest` of the lane's lse.
  TILEWISE_DEVICE void begin(float highest, float sink) {
    base.lse = exponent_base(ptx::fmax(max_of_warp(highest), sink));
  }
  TILEWISE_DEVICE bool needs_low() const { return common::needs_low(base.lse); }
  // Then: the low part of the largest sum. `low` is that of the lane's splits whose lse is
  // base.lse, -inf of others.
  TILEWISE_DEVICE void refine(float low, float sink) {
    base.low = exponent_base(max(low, sink == base.lse ? 0.0f : kMinusInfinity));
  }

  // What a split weighs beside the largest one.
  TILEWISE_DEVICE float beside(const LogSum& sum) const { return exponential(sum.above(base)); }

  // `sum` of the lane's `beside`; returns lse of the row.
  TILEWISE_DEVICE LogSum finish(float sum, float sink) {
    sum = sum_of_warp(sum) + beside({sink, 0.0f});
    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return sum == 0.0f ? LogSum{} : LogSum::of(base.lse, ptx::log_accurate(sum), base.low);
  }
  TILEWISE_DEVICE float of(const LogSum& sum) const {
    return sum.lse == kMinusInfinity ? kNoWeight : beside(sum) * inverse;
  }
  TILEWISE_DEVICE static float add(float sum, float weight, uint32_t x) {
    const float value = weight != kNoWeight ? ptx::float_of(x) : 0.0f;
    return ptx::fma(weight, value, sum);
  }
};

}  // namespace tilewise::cuda::common
