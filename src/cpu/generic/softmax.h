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

// In double: the backward takes weights from it, and each rounding of lse is one of all of them.
TILEWISE_FN float lse_of(float m, float l, float exponent) {
  if (l == 0.0f) return kMinusInfinity;
  const double highest = static_cast<double>(m) * static_cast<double>(exponent);
  return static_cast<float>(highest * kLn2 + __builtin_log(static_cast<double>(l)));
}

}  // namespace
}  // namespace tilewise::cpu
