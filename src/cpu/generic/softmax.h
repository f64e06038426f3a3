// The softmax of a row, as the prefill forward and the decode forward share it.
#pragma once

#include "attention/online_softmax.h"
#include "cpu/generic/simd.h"
#include "cpu/generic/tasks.h"

namespace tilewise::cpu {
namespace {

// Degree of the exp2 polynomial: its error stays below the rounding of the weights.
template <class T>
inline constexpr int kExpDegree = 5;
template <>
inline constexpr int kExpDegree<BFloat16> = 3;
template <>
inline constexpr int kExpDegree<Half> = 4;

// m is raised, and l and O are rescaled, only when the maximum of a tile exceeds m by more than
// this exponent (base 2). Weights may reach 256, which all formats here can represent, and most
// tiles rescale nothing. FlashAttention-4 calls this conditional rescaling.
inline constexpr float kRescaleThreshold = 8.0f;

// A row is huge if its largest score, in natural units, is above this: the forward then computes it
// again in the general form, and the backward uses that form where lse is above it. fp32 numbers
// are 2 apart there, and in the plain form, whose scores are not rounded before they are compared,
// lse and lse_low could not hold m.
inline constexpr float kHugeScore = 1 << 24;

// Scores that the plain form, which divides by the scale, cannot represent need the general form.
TILEWISE_FN bool is_general(const Problem& p, const Score& score) {
  return tilewise::is_general(p) || __builtin_fabsf(score.scale) < 1e-30f;
}

// How scores become weights: P = 2^((S - m) c). The general form has S in natural units. The plain
// form keeps S raw, with the scale in c and the sign of a negative scale in Q.
template <class T>
struct SoftmaxScaling {
  bool general;
  float c;
  float unit;  // one unit of S, in natural units

  TILEWISE_FN static SoftmaxScaling of(const Score& score, bool general) {
    const float unit = general ? 1.0f : __builtin_fabsf(score.scale);
    return {general, unit * kLog2e, unit};
  }

  // Fused: S c - m c with m c rounded is one instruction less than (S - m) c. The rounding changes
  // all weights of a row by the same factor, and by little while m is not huge, as it never is in
  // the plain form: accurate enough for 16-bit types.
  static constexpr bool kMayFuse = sizeof(T) == 2 && kHasFma;
  TILEWISE_FN bool fused() const { return kMayFuse && !general; }

  // The term subtracted from S, or from S c if fused. m c must be the same rounded number wherever
  // it is used; the selection keeps the compiler from contracting the product into an FMA.
  TILEWISE_FN F base(F m) const {
    if (!fused()) return m;
    const F scaled = m * c;
    return m == kMinusInfinity ? m : scaled;
  }

  template <bool kFused>
  TILEWISE_FN F exponent(F s, F base) const {
    return kFused ? s * c - base : (s - base) * c;
  }

  // The factor for l and O when m is raised.
  TILEWISE_FN F alpha(F old, F raised) const {
    const F difference = base(old) - base(raised);
    return exp2<kExpDegree<float>>(fused() ? difference : difference * c);
  }

  // The score, in natural units, whose weight is 1.
  TILEWISE_FN D highest(F m) const {
    const D exact = __builtin_convertvector(m, D) * static_cast<double>(unit);
    if (!fused()) return exact;
    const D change = __builtin_convertvector(base(m), D) -
                     __builtin_convertvector(m, D) * static_cast<double>(c);
    return exact + change * kLn2;
  }

  // Marks the rows that have to be computed again. A row whose sink exceeds every raw score has an
  // infinite m.
  TILEWISE_FN I huge(F m, F l) const {
    const F score = m * unit;
    const F magnitude = score < 0.0f ? -score : score;
    return general ? I{} : (magnitude > kHugeScore) & ((m > kMinusInfinity) | (l > 0.0f));
  }
};

// Merges a value into an entry of max_logits, to which several work items contribute. The result
// does not depend on their order: every zero is +0, and every NaN is the same one, which stays.
TILEWISE_FN void merge_max_logit(float* to, float value) {
  value = value == value ? value + 0.0f : __builtin_nanf("");
  float old;
  __atomic_load(to, &old, __ATOMIC_RELAXED);
  while (old == old && !(value <= old) &&
         !__atomic_compare_exchange(to, &old, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

struct SoftmaxState {
  float m = kMinusInfinity;  // in the units of S
  float l = 0.0f;
};

// The state before any key: the sink alone. Its weight compensates for the rounding of m. A huge
// sink either vanishes beside the score of a key or leaves a huge row, which is computed again.
template <class T>
TILEWISE_FN SoftmaxState first_state(const ForwardTask& task, int64_t head,
                                     const SoftmaxScaling<T>& scaling) {
  const float* const sinks = task.problem->sinks;
  if (sinks == nullptr || !task.first_split || sinks[head] == kMinusInfinity) return {};
  const float m = sinks[head] / scaling.unit;
  if (scaling.general || __builtin_fabsf(sinks[head]) > kHugeScore) return {m, 1.0f};
  const double off = static_cast<double>(sinks[head]) - scaling.highest(splat(m))[0];
  return {m, static_cast<float>(__builtin_exp(off))};
}

// log(x) of positive normal numbers, relative error below 1e-11: x = 2^e m with m from sqrt(1/2) to
// sqrt(2), and log(m) = 2 artanh(s), s = (m - 1) / (m + 1).
TILEWISE_FN D log(D x) {
  using I64 = int64_t __attribute__((vector_size(W * 8)));
  constexpr int64_t kRootOfHalf = 0x3fe6a09e667f3bcd;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the low bits of a sum are integers
  const I64 bits = load_as<I64>(&x);
  const I64 e = (bits - kRootOfHalf) >> 52;
  const I64 mantissa = bits - (e << 52);
  const I64 shifted = e + load_as<int64_t>(&kMagic);
  const D m = load_as<D>(&mantissa);
  const D s = (m - 1.0) / (m + 1.0);
  const D z = s * s;
  D series = D{} + 1.0 / 13;
  for (const double c : {1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0})
    series = series * z + c;
  return (load_as<D>(&shifted) - kMagic) * kLn2 + 2.0 * s * series;
}

// LogSum of W rows.
struct LogSums {
  F lse;
  F low;
};

// lse and its rounding error. The highest score is subtracted before log l is added, which would
// otherwise be lost where that score is huge.
template <class T>
TILEWISE_FN LogSums lse_of(F m, F l, const SoftmaxScaling<T>& scaling) {
  const D highest = scaling.highest(m);
  const D sum = log(__builtin_convertvector(l, D));
  const F infinity = splat(-kMinusInfinity);
  const F nearest = __builtin_convertvector(highest + sum, F);
  const F lse = l == 0.0f ? -infinity : (l < infinity ? nearest : l);
  const F low = __builtin_convertvector((highest - __builtin_convertvector(lse, D)) + sum, F);
  return {lse, lse - lse == 0.0f ? low : F{}};
}

}  // namespace
}  // namespace tilewise::cpu
