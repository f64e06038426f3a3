// What the policies of src/attention compute with in device code (see attention/scalar_math.h).
#pragma once

#include "cuda/ptx/convert.h"

namespace tilewise::cuda {

struct DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) { return ptx::tanh(x); }

  TILEWISE_DEVICE static void mul_high_low(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
    *high = ptx::mul_high(a, b);
    *low = a * b;
  }
};

// For 16-bit tensors: errors of 2e-7 of the largest value, far below their rounding.
struct HalfMath : DeviceMath {
  TILEWISE_DEVICE static float tanh(float x) {
    const float e = ptx::ex2(x * 2.885390082f);  // e^2x
    return ptx::fma(-2.0f, ptx::rcp_approximate(e + 1.0f), 1.0f);
  }
};

}  // namespace tilewise::cuda
