// The streaming softmax (Milakov & Gimelshein, arXiv 1805.02867): running maximum, running sum,
// rescaling, and the merge of two partial states (FlashAttention-2, section 3.1).
#pragma once

#include "base/math.h"

namespace tilewise {

inline constexpr double kLog2eExact = 1.4426950408889634;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr double kLn2 = 0.6931471805599453;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// A row that has seen no key has m = -inf; exponents are then taken relative to 0, so that
// exp2(-inf - 0) = 0 and not exp2(-inf + inf) = NaN.
TILEWISE_FN float exponent_base(float m) { return m == kMinusInfinity ? 0.0f : m; }

// x - base, where base is the maximum; exp of the result is the weight of x. The weight of the
// maximum itself is 1 even if it is +inf, as a sink may be; all others then weigh 0.
TILEWISE_FN float above(float x, float base) { return x == base ? 0.0f : x - base; }

// A log-sum-exp in two floats (tilewise_attention::lse and lse_low). Where |m| is huge, the sum m +
// log l loses log l in fp32, but the weights of a row need both. low is 0 where lse is infinite.
struct LogSum {
  float lse = kMinusInfinity;
  float low = 0.0f;

  // The sum m + log_l in two floats. `low` is the part of the maximum that m does not hold.
  TILEWISE_FN static LogSum of(float m, float log_l, float low = 0.0f) {
    const float lse = m + log_l;
    if (lse - lse != 0.0f) return {lse, 0.0f};
    return {lse, ((m - lse) + log_l) + low};
  }

  TILEWISE_FN bool operator<(const LogSum& other) const {
    return lse < other.lse || (lse == other.lse && low < other.low);
  }

  // The exponent of the weight of this sum relative to the largest one, `base`.
  TILEWISE_FN float above(const LogSum& base) const {
    if (lse == kMinusInfinity) return lse;
    return tilewise::above(lse, base.lse) + (low - base.low);
  }
};

// Two partial results over disjoint keys, each out = sum(p v) / sum(p) with its lse. The whole is
// weight_a * out_a + weight_b * out_b: exact, associative up to rounding; lse = -inf means "no
// keys".
struct Merge {
  float weight_a;
  float weight_b;
  LogSum sum;

  TILEWISE_HOST_DEVICE static Merge of(const LogSum& a, const LogSum& b);
};

inline __attribute__((always_inline)) Merge Merge::of(const LogSum& a, const LogSum& b) {
  const LogSum base = a < b ? b : a;
  const float weight_a = __builtin_expf(a.above(base));
  const float weight_b = __builtin_expf(b.above(base));
  const float l = weight_a + weight_b;
  if (l == 0.0f) return {0.0f, 0.0f, {}};
  return {weight_a / l, weight_b / l, LogSum::of(base.lse, __builtin_logf(l), base.low)};
}

}  // namespace tilewise
