// Arithmetic on two floats at once, and the maximum that keeps NaN (sm_100). PTX ISA 9.7.3.
#pragma once

#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

using FloatPair = float[2];

#if defined(TILEWISE_EMULATOR)

// add.rn.f32x2
TILEWISE_DEVICE void add_f32x2(FloatPair& d, const FloatPair& a, const FloatPair& b) {
  for (int i = 0; i < 2; ++i) d[i] = a[i] + b[i];
}
// sub.rn.f32x2
TILEWISE_DEVICE void sub_f32x2(FloatPair& d, const FloatPair& a, const FloatPair& b) {
  for (int i = 0; i < 2; ++i) d[i] = a[i] - b[i];
}
// fma.rn.f32x2: a b + c
TILEWISE_DEVICE void fma_f32x2(FloatPair& d, const FloatPair& a, const FloatPair& b,
                               const FloatPair& c) {
  for (int i = 0; i < 2; ++i) d[i] = __builtin_fmaf(a[i], b[i], c[i]);
}
// max.NaN.f32: NaN if one of them is NaN.
TILEWISE_DEVICE float fmax_nan(float a, float b) {
  return a != a || b != b ? __builtin_nanf("") : __builtin_fmaxf(a, b);
}

#else

#define TILEWISE_PAIR_OPERATION(name, instruction)                                        \
  TILEWISE_DEVICE void name(FloatPair& d, const FloatPair& a, const FloatPair& b) {       \
    asm("{\n.reg .b64 a, b, d;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\n" instruction \
        " d, a, b;\nmov.b64 {%0, %1}, d;\n}"                                              \
        : "=f"(d[0]), "=f"(d[1])                                                          \
        : "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]));                                    \
  }
TILEWISE_PAIR_OPERATION(add_f32x2, "add.rn.f32x2")
TILEWISE_PAIR_OPERATION(sub_f32x2, "sub.rn.f32x2")
#undef TILEWISE_PAIR_OPERATION
TILEWISE_DEVICE void fma_f32x2(FloatPair& d, const FloatPair& a, const FloatPair& b,
                               const FloatPair& c) {
  asm("{\n.reg .b64 a, b, c, d;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\n"
      "mov.b64 c, {%6, %7};\nfma.rn.f32x2 d, a, b, c;\nmov.b64 {%0, %1}, d;\n}"
      : "=f"(d[0]), "=f"(d[1])
      : "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]), "f"(c[0]), "f"(c[1]));
}
TILEWISE_DEVICE float fmax_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

#endif

}  // namespace tilewise::cuda::ptx
