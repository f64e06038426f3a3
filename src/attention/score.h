// The score modification between q.k and the softmax: its value and its derivative.
#pragma once

#include "attention/scalar_math.h"
#include "base/math.h"

namespace tilewise {

// score = softcap(scale * raw) - slope * distance + bias, in natural units. V is a float or a
// vector of floats; Math provides the functions on it (scalar_math.h).
//
// The value is what the softmax exponentiates; the derivative is d(score) / d(scale * raw). Slope
// and bias are added after the cap and do not appear in the derivative; the gradient of the bias is
// the gradient of the score itself.
struct Score {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: off

  template <class V>
  struct Capped {
    V value;
    V derivative;
  };

  template <class Math, class V>
  TILEWISE_FN Capped<V> cap(V raw) const {
    const V scaled = raw * scale;
    if (softcap == 0.0f) return {scaled, V{} + 1.0f};
    const V t = Math::tanh(scaled * (1.0f / softcap));
    return {t * softcap, 1.0f - t * t};
  }

  template <class Math, class V>
  TILEWISE_FN Capped<V> apply(V raw, V slope, V distance, V bias) const {
    Capped<V> s = cap<Math>(raw);
    s.value = s.value - slope * distance + bias;
    return s;
  }
};

}  // namespace tilewise
