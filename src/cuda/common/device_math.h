// What the policies of src/attention compute with in device code (see attention/scalar_math.h).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

struct DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return ptx::tanh(x); }

  // tanh(factor * x) of all scores of a lane.
  struct ScaledTanh {
    float factor;

    TILEWISE_DEVICE explicit ScaledTanh(float factor_) : factor(factor_) {}
    template <int kCount>
    TILEWISE_DEVICE void apply(float (&x)[kCount]) const {
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
  TILEWISE_DEVICE static float tanh(float x) { return tanh_of_exponent(x * kToExponent); }

  // An exponential and a reciprocal a score beside the exponential of the softmax would make the
  // special function unit the wall. The factor is not negative.
  class ScaledTanh {
   public:
    TILEWISE_DEVICE explicit ScaledTanh(float factor) : factor_(factor) {}

    // The lanes of a warp go the same way. Scores mostly stay far below their cap.
    template <int kCount>
    TILEWISE_DEVICE void apply(float (&x)[kCount]) const {
      float largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        largest[i % 4] = ptx::fmax(largest[i % 4], __builtin_fabsf(x[i]));
      largest[0] = ptx::fmax(largest[0], largest[1]);
      largest[2] = ptx::fmax(largest[2], largest[3]);
      if (ptx::any(!is_small(ptx::fmax(largest[0], largest[2]))))
        apply_to_any(x);
      else
        apply_to_small(x);
    }

    // Powers of smaller factors would be subnormal.
    TILEWISE_DEVICE bool is_small(float x) const {
      return x * factor_ <= 0.4f && factor_ >= 0x1p-16f;
    }

    // The best polynomial of degree 7 up to 0.4: a relative error of 1.2e-7, and that of rounding.
    template <int kCount>
    TILEWISE_DEVICE void apply_to_small(float (&x)[kCount]) const {
      const float f = ptx::float_of(ptx::recent(ptx::bits_of(factor_)));  // no powers kept in loops
      const float square = f * f;
      float power = f;
      float c[3] = {-0.33331883f, 0.13277641f, -0.047794897f};
#pragma unroll
      for (float& each : c) each *= power *= square;
#pragma unroll
      for (float& each : x) {
        const float u = each * each;
        each *= ptx::fma(ptx::fma(ptx::fma(c[2], u, c[1]), u, c[0]), u, f);
      }
    }

    // Three of four go without the reciprocal: then that unit and the other ones take equally long.
    template <int kCount>
    TILEWISE_DEVICE void apply_to_any(float (&x)[kCount]) const {
      const float exponent = factor_ * kToExponent;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        x[i] = i % 4 == 3 ? tanh_of_exponent(x[i] * exponent) : tanh_by_newton(x[i] * exponent);
    }

   private:
    float factor_;
  };

 private:
  static constexpr float kToExponent = 2.885390082f;  // e^2x = 2^(kToExponent x)

  // tanh(x) of y = kToExponent x.
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
