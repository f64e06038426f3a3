// The functions that policies need from a backend, for plain numbers: host code, tests, and device
// code where a scalar is a register. A backend with vectors brings a struct of the same shape.
#pragma once

#include "base/platform.h"

namespace tilewise {

struct ScalarMath {
  TILEWISE_FN static float tanh(float x) { return __builtin_tanhf(x); }

  TILEWISE_FN static void mul_high_low(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    *high = static_cast<uint32_t>(product >> 32);
    *low = static_cast<uint32_t>(product);
  }
};

}  // namespace tilewise
