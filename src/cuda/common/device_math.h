// Device versions of the functions that the policies of src/attention take as a template argument
// (attention/scalar_math.h).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

struct DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return ptx::tanh(x); }

  // tanh(factor * x) for all scores of a lane.
  struct ScaledTanh {
    float factor;

    TILEWISE_DEVICE explicit ScaledTanh(float factor_) : factor(factor_) {}
    template <int kCount>
    TILEWISE_DEVICE void apply(float (&x)[kCount]) const {
#pragma unroll
      for (float& value : x) value = tanh(value * factor);
    }
  };

  TILEWISE_DEVICE static void mul_high_low(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
    const uint64_t product = uint64_t{a} * b;  // one instruction; two halves are sometimes two
    *high = static_cast<uint32_t>(product >> 32);
    *low = static_cast<uint32_t>(product);
  }

  // One prmt each; shifts and masks would take two to five instructions.
  TILEWISE_DEVICE static uint32_t low_halves(uint32_t a, uint32_t b) {
    return ptx::prmt<0x5410>(a, b);
  }
  TILEWISE_DEVICE static uint32_t high_halves(uint32_t a, uint32_t b) {
    return ptx::prmt<0x7632>(a, b);
  }
  TILEWISE_DEVICE static uint32_t swap_bytes_of_halves(uint32_t x) {
    return ptx::prmt<0x2301>(x, x);
  }
};

// For 16-bit tensors: errors of 2e-7 of the largest value, far below their rounding.
struct HalfMath : DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return tanh_of_exponent(x * kToExponent); }

  // One exponential and one reciprocal per score, besides the exponential of the softmax, would
  // make the special function unit the bottleneck.
  class ScaledTanh {
   public:
    TILEWISE_DEVICE explicit ScaledTanh(float factor) : factor_(factor) {}

    template <int kCount>
    TILEWISE_DEVICE void apply(float (&x)[kCount]) const {
      if (are_small(x))
        apply_to_small(x);
      else
        apply_to_any(x);
    }

    // The same answer in all lanes of a warp. Scores mostly stay far below their cap.
    template <int kCount>
    TILEWISE_DEVICE bool are_small(const float (&x)[kCount]) const {
      float largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        largest[i % 4] = ptx::fmax(largest[i % 4], __builtin_fabsf(x[i]));
      largest[0] = ptx::fmax(largest[0], largest[1]);
      largest[2] = ptx::fmax(largest[2], largest[3]);
      return !ptx::any(!is_small(ptx::fmax(largest[0], largest[2])));
    }

    // Powers of smaller factors would be subnormal, those of larger ones infinite.
    TILEWISE_DEVICE bool is_small(float x) const {
      const float factor = __builtin_fabsf(factor_);
      return x * factor <= 0.4f && factor >= 0x1p-16f && factor <= 0x1p16f;
    }

    // unit * tanh(factor * x), plus an optional term, for small x: the best polynomial of degree 7
    // for arguments up to 0.4, with a relative error of 1.2e-7 besides rounding.
    class SmallTanh {
     public:
      TILEWISE_DEVICE SmallTanh(float factor, float unit) {
        const float square = factor * factor;
        float power = factor;
        c_[0] = factor * unit;
        c_[1] = -0.33331883f * unit * (power *= square);
        c_[2] = 0.13277641f * unit * (power *= square);
        c_[3] = -0.047794897f * unit * (power *= square);
      }
      TILEWISE_DEVICE float operator()(float x) const { return x * slope(x * x); }
      TILEWISE_DEVICE float operator()(float x, float term) const {
        return ptx::fma(x, slope(x * x), term);
      }

     private:
      TILEWISE_DEVICE float slope(float u) const {
        return ptx::fma(ptx::fma(ptx::fma(c_[3], u, c_[2]), u, c_[1]), u, c_[0]);
      }

      float c_[4];
    };
    TILEWISE_DEVICE SmallTanh small(float unit) const {
      // opaque: the powers are computed at each use instead of being kept in registers.
      return SmallTanh(ptx::float_of(ptx::opaque(ptx::bits_of(factor_))), unit);
    }
    template <int kCount>
    TILEWISE_DEVICE void apply_to_small(float (&x)[kCount]) const {
      const SmallTanh tanh = small(1.0f);
#pragma unroll
      for (float& value : x) value = tanh(value);
    }

    // Three of four scores go without the reciprocal: the special function unit and the other units
    // are then busy for equally long.
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

  // tanh(x) from y = kToExponent * x.
  TILEWISE_DEVICE static float tanh_of_exponent(float y) {
    return ptx::fma(-2.0f, ptx::rcp_approximate(ptx::ex2(y) + 1.0f), 1.0f);
  }

  // The same: two Newton steps, which start from the best parabola, for 2 / (1 + e) with
  // e = 2^-|y| in [0, 1]. The relative errors are 1 / 99, 1e-4 and 1e-8.
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
