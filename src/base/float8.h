// float8_e4m3 (OCP 8-bit floating point, "fn": no infinity, 0x7f is NaN): 4 bits of exponent, 3 of
// mantissa, magnitudes 2^-9 to 448.
#pragma once

#include "base/half.h"

namespace tilewise {

struct Float8 {
  uint8_t bits;
};

// Exact. It computes with an integer because the caller may have switched subnormal numbers off.
TILEWISE_FN float to_float(Float8 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t exponent = magnitude >> 3;
  const uint32_t mantissa = (magnitude & 7u) + (exponent != 0 ? 8u : 0u);
  const uint32_t step =
      (exponent != 0 ? exponent : 1u) + (127 - 10);  // exponent bits of 2^(exponent - 10)
  const float value =
      static_cast<float>(static_cast<int32_t>(mantissa)) * detail::float_of(step << 23);
  const uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : detail::bits_of(value);
  return detail::float_of(bits | (static_cast<uint32_t>(x.bits & 0x80u) << 24));
}

// Rounds to nearest even. Magnitudes above 448, including infinities, become 448. NaN stays NaN.
template <>
TILEWISE_FN Float8 from_float<Float8>(float x) {
  const uint32_t u = detail::bits_of(x);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 lets the FPU round at 2^-9
    const float shifted = detail::float_of(magnitude) + 16384.0f;
    return {static_cast<uint8_t>(sign | (detail::bits_of(shifted) - 0x46800000u))};
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return {static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)))};
}

}  // namespace tilewise
