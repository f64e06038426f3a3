// The streaming softmax (Milakov & Gimelshein, arXiv 1805.02867): running maximum, running sum,
// rescaling, and the merge of two partial states (FlashAttention-2, section 3.1).
#pragma once

#include "base/math.h"

namespace tilewise {

inline constexpr double kLog2eExact = 1.4426950408889634;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr double kLn2 = 0.6931471805599453;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// A row that has seen nothing has m = -inf; exponents are taken relative to 0 then, so that
// exp2(-inf - 0) = 0 and never exp2(-inf + inf) = NaN.
TILEWISE_FN float exponent_base(float m) { return m == kMinusInfinity ? 0.0f : m; }

// x - base, where base is the largest of what is weighed: exp of it is the weight of x. That of the
// largest is 1 even if it is +inf, as a sink may be: all others weigh 0 then.
TILEWISE_FN float above(float x, float base) { return x == base ? 0.0f : x - base; }

// Two partial results over disjoint keys, each out = sum(p v) / sum(p) with its lse: the whole is
// weight_a * out_a + weight_b * out_b. Exact, associative up to rounding; -inf means "no keys".
struct Merge {
  float weight_a;
  float weight_b;
  float lse;

  TILEWISE_HOST_DEVICE static Merge of(float lse_a, float lse_b);
};

inline __attribute__((always_inline)) Merge Merge::of(float lse_a, float lse_b) {
  const float base = exponent_base(max(lse_a, lse_b));
  const float a = __builtin_expf(above(lse_a, base));
  const float b = __builtin_expf(above(lse_b, base));
  const float sum = a + b;
  if (sum == 0.0f) return {0.0f, 0.0f, kMinusInfinity};
  return {a / sum, b / sum, base + __builtin_logf(sum)};
}

}  // namespace tilewise
