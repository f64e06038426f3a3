// What the forwards of a tile and of decoding know of the softmax of a row.
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

// m is raised where a tile's maximum has outgrown it by more than this factor's logarithm to base
// 2, and l and O are rescaled then: weights may reach 256, which no format here minds, and most
// tiles rescale nothing (FlashAttention-4 calls this conditional rescaling).
inline constexpr float kOutgrown = 8.0f;

// c of P = 2^((S - m) c). The plain form keeps S raw and has the scale here; a negative scale moves
// into Q.
TILEWISE_FN float exponent_of(const Score& score, bool general) {
  return general ? kLog2e : max(__builtin_fabsf(score.scale) * kLog2e, 1e-30f);
}

// (S - m) c. To 16 bits the rounding of m c is nothing, and the difference is one instruction.
template <class T>
TILEWISE_FN F exponent_at(F s, F m, float c) {
  return sizeof(T) == 2 ? s * c - m * c : (s - m) * c;
}

struct SoftmaxState {
  float m = kMinusInfinity;  // in the units of S
  float l = 0.0f;
};

// Before any key: the sink's weight is 2^((m - m) c) = 1.
TILEWISE_FN SoftmaxState first_state(const ForwardTask& task, int64_t head, float exponent) {
  const float* const sinks = task.problem->sinks;
  if (sinks == nullptr || !task.first_split || sinks[head] == kMinusInfinity) return {};
  return {sinks[head] * kLog2e / exponent, 1.0f};
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

// The highest score is taken off before log l is added, which it would swallow where it is huge.
TILEWISE_FN LogSums lse_of(F m, F l, float exponent) {
  const D highest = __builtin_convertvector(m, D) * static_cast<double>(exponent) * kLn2;
  const D sum = log(__builtin_convertvector(l, D));
  const F infinity = splat(-kMinusInfinity);
  const F rounded = __builtin_convertvector(highest + sum, F);
  const F lse = l == 0.0f ? -infinity : (l < infinity ? rounded : l);
  const F low = __builtin_convertvector((highest - __builtin_convertvector(lse, D)) + sum, F);
  return {lse, lse - lse == 0.0f ? low : F{}};
}

}  // namespace
}  // namespace tilewise::cpu
