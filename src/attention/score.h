// The score modification between q.k and the softmax: its value and its derivative.
#pragma once

#include "attention/scalar_math.h"
#include "base/math.h"

namespace tilewise {

// score = softcap(scale * raw) - slope * distance + bias, in natural units. V is a float or a
// vector of floats; Math provides the functions on it (scalar_math.h).
//
// The value is what the softmax exponentiates; the derivatives are the first two of the score with
// respect to scale * raw. Slope and bias are added after the cap and do not appear in them; the
// gradient of the bias is the gradient of the score itself.
struct Score {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: off

  template <class V>
  struct Capped {
    V value;
    V derivative;
    V second = {};  // derivative; 0 without a softcap
  };

  template <class Math, class V>
  TILEWISE_FN Capped<V> cap(V raw) const {
    const V scaled = raw * scale;
    if (softcap == 0.0f) return {scaled, V{} + 1.0f};
    const V t = Math::tanh(scaled * (1.0f / softcap));
    const V derivative = 1.0f - t * t;
    return {t * softcap, derivative, t * derivative * (-2.0f / softcap)};
  }

  template <class Math, class V>
  TILEWISE_FN Capped<V> apply(V raw, V slope, V distance, V bias) const {
    Capped<V> s = cap<Math>(raw);
    s.value = s.value - slope * distance + bias;
    return s;
  }
};

}  // namespace tilewise
