// The functions that the policies need from a backend, on scalars: for host code, tests and device
// code, where a scalar is a register. A backend with vectors provides a struct of the same form.
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

  // Both low halves, or both high halves, in one word; that of `a` becomes its low half.
  TILEWISE_FN static uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
  TILEWISE_FN static uint32_t high_halves(uint32_t a, uint32_t b) {
    return a >> 16 | (b & 0xffff0000u);
  }
  TILEWISE_FN static uint32_t swap_bytes_of_halves(uint32_t x) {
    return (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
  }
};

}  // namespace tilewise
