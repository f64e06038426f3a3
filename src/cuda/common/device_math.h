// What the policies of src/attention compute with in device code (see attention/scalar_math.h).
#pragma once

#include "cuda/ptx/convert.h"

namespace tilewise::cuda {

struct DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return ptx::tanh(x); }

  // tanh(factor * x) of four scores at a time.
  struct ScaledTanh {
    float factor;

    TILEWISE_DEVICE explicit ScaledTanh(float factor_) : factor(factor_) {}
    TILEWISE_DEVICE void apply(float (&x)[4]) const {
#pragma unroll
      for (float& each : x) each = tanh(each * factor);
    }
  };

  TILEWISE_DEVICE static void mul_high_low(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
    *high = ptx::mul_high(a, b);
    *low = a * b;
  }
};

// For 16-bit tensors: errors of 2e-7 of the largest value, far below their rounding.
struct HalfMath : DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return tanh_of_exponent(x * 2.885390082f); }

  // An exponential and a reciprocal beside the exponential of the softmax would make the special
  // function unit the wall: three of four scores go without the reciprocal, which it and the other
  // pipes are equally long busy with.
  struct ScaledTanh {
    float exponent;  // of x, that of e^2x in units of log2

    TILEWISE_DEVICE explicit ScaledTanh(float factor) : exponent(factor * 2.885390082f) {}
    TILEWISE_DEVICE void apply(float (&x)[4]) const {
#pragma unroll
      for (int i = 0; i < 3; ++i) x[i] = tanh_by_newton(x[i] * exponent);
      x[3] = tanh_of_exponent(x[3] * exponent);
    }
  };

 private:
  // tanh(x) of y = 2 log2(e) x.
  TILEWISE_DEVICE static float tanh_of_exponent(float y) {
    return ptx::fma(-2.0f, ptx::rcp_approximate(ptx::ex2(y) + 1.0f), 1.0f);
  }

  // The same: 2 / (1 + e) of e = 2^-|y| from 0 to 1 by two steps of Newton, which start at the best
  // parabola. Relative errors of 1 / 99, 1e-4 and 1e-8.
  TILEWISE_DEVICE static float tanh_by_newton(float y) {
    const float e = ptx::ex2(-__builtin_fabsf(y));
    const float d = ptx::fma(e, 0.5f, 0.5f);
    float r = ptx::fma(ptx::fma(e, 64.0f / 99.0f, -160.0f / 99.0f), e, 196.0f / 99.0f);
    r = ptx::fma(ptx::fma(-d, r, 1.0f), r, r);
    r = ptx::fma(ptx::fma(-d, r, 1.0f), r, r);
    return __builtin_copysignf(r - 1.0f, y);
  }
};

}  // namespace tilewise::cuda
