// Scalar conversions of the 16-bit storage types: they round to nearest even, and NaN stays NaN.
#pragma once

#include "base/platform.h"

namespace tilewise {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

namespace detail {
TILEWISE_FN uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
TILEWISE_FN float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
}  // namespace detail

TILEWISE_FN float to_float(float x) { return x; }

TILEWISE_FN float to_float(BFloat16 x) {
  return detail::float_of(static_cast<uint32_t>(x.bits) << 16);
}

TILEWISE_FN float to_float(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return detail::float_of(sign | 0x70000000u | magnitude);
  // Multiplying by 2^112 adjusts the exponent and normalises subnormal numbers.
  const float scaled = detail::float_of(magnitude) * 5.192296858534828e33f;
  return detail::float_of(sign | detail::bits_of(scaled));
}

template <class T>
TILEWISE_FN T from_float(float x);

template <>
TILEWISE_FN float from_float<float>(float x) {
  return x;
}

template <>
TILEWISE_FN BFloat16 from_float<BFloat16>(float x) {
  const uint32_t u = detail::bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
TILEWISE_FN Half from_float<Half>(float x) {
  const uint32_t u = detail::bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the FPU round at 2^-24
    const float shifted = detail::float_of(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (detail::bits_of(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace tilewise
