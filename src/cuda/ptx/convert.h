// Conversions, bit operations, and the functions of the special function unit. PTX ISA 9.7.3 (ex2,
// lg2), 9.7.9 (cvt).
#pragma once

#include "base/half.h"
#include "base/math.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda::ptx {

#if defined(TILEWISE_EMULATOR)

// cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32: two floats rounded to nearest even, `low` in the low
// half.
TILEWISE_DEVICE uint32_t cvt_f16x2(float low, float high) { return emulator::cvt_f16x2(low, high); }
TILEWISE_DEVICE uint32_t cvt_bf16x2(float low, float high) {
  return emulator::cvt_bf16x2(low, high);
}
// cvt.rn.f16x2.e4m3x2: converts the two float8_e4m3 numbers in the low or high half of x, exactly.
// The number in the low byte goes to the low half of the result.
template <bool kUpperHalf>
TILEWISE_DEVICE uint32_t cvt_f16x2_e4m3x2(uint32_t x) {
  return emulator::cvt_f16x2_e4m3x2(static_cast<uint16_t>(kUpperHalf ? x >> 16 : x));
}
// cvt.rn.satfinite.e4m3x2.f32, twice: four floats rounded to nearest even, x0 in the lowest byte.
// Magnitudes above 448 become 448; NaN stays NaN.
TILEWISE_DEVICE uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
  return emulator::cvt_e4m3x4(x0, x1, x2, x3);
}
// cvt.f32.f16 of the low half.
TILEWISE_DEVICE float cvt_f32_f16(uint32_t x) {
  return to_float(Half{static_cast<uint16_t>(x & 0xffffu)});
}
// cvt.rna.tf32.f32: rounds to the 11 bits that tf32 products read, ties away from zero; the low 13
// bits are 0.
TILEWISE_DEVICE uint32_t cvt_tf32(float x) {
  const uint32_t bits = tilewise::detail::bits_of(x);
  return x != x ? 0x7fffe000u : (bits + 0x1000u) & 0xffffe000u;
}
// ex2.approx.ftz (2^x) and lg2.approx.ftz (log2 x), with a relative error of 2^-22, and
// rcp.approx.ftz (1 / x), with 2^-23. Subnormal arguments and results become 0, such as 1 / x for x
// above 2^126.
TILEWISE_DEVICE float ex2(float x) { return emulator::ex2(x); }
TILEWISE_DEVICE float lg2(float x) { return emulator::lg2(x); }
TILEWISE_DEVICE float rcp_approximate(float x) { return emulator::rcp_approximate(x); }
// fma.rn.f32
TILEWISE_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// mul.rn.f32: a rounded product, which the compiler may not contract with an addition.
TILEWISE_DEVICE float mul(float a, float b) { return a * b; }
// max.f32: the larger one; NaN loses against a number.
TILEWISE_DEVICE float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
// The accurate functions of the CUDA math library.
TILEWISE_DEVICE float tanh(float x) { return __builtin_tanhf(x); }
TILEWISE_DEVICE float exp2_accurate(float x) { return __builtin_exp2f(x); }
TILEWISE_DEVICE float log_accurate(float x) { return __builtin_logf(x); }
TILEWISE_DEVICE uint32_t bits_of(float x) { return tilewise::detail::bits_of(x); }
TILEWISE_DEVICE float float_of(uint32_t x) { return tilewise::detail::float_of(x); }
// mul.hi.u32
TILEWISE_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
// lop3.b32: (x & mask) | bits in one instruction. With constants the compiler would use two.
TILEWISE_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  return (x & mask) | bits;
}
// prmt.b32: byte i of the result is byte (kBytes >> 4 i) % 8 of a (bytes 0 to 3) and b (4 to 7).
template <uint32_t kBytes>
TILEWISE_DEVICE uint32_t prmt(uint32_t a, uint32_t b) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i)
    r |= (static_cast<uint32_t>(both >> (8 * (kBytes >> 4 * i & 7u))) & 0xffu) << 8 * i;
  return r;
}
// prmt.b32 with sign replication: the low half of the result is 0xffff if byte `byte` of `low` has
// its highest bit set, otherwise 0; the high half likewise from `high`.
TILEWISE_DEVICE uint32_t spread_signs(uint32_t low, uint32_t high, int byte) {
  const int bit = 8 * byte + 7;
  return ((low >> bit & 1u) | (high >> bit & 1u) << 16) * 0xffffu;
}

#else

TILEWISE_DEVICE uint32_t cvt_f16x2(float low, float high) {
  uint32_t r;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else  // one at a time
  asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
      : "=r"(r)
      : "f"(low), "f"(high));
#endif
  return r;
}
TILEWISE_DEVICE uint32_t cvt_bf16x2(float low, float high) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return from_float<BFloat16>(low).bits | static_cast<uint32_t>(from_float<BFloat16>(high).bits)
                                              << 16;
#endif
}
template <bool kUpperHalf>
TILEWISE_DEVICE uint32_t cvt_f16x2_e4m3x2(uint32_t x) {  // sm_89; choosing a half is free
  uint32_t r;
  if constexpr (kUpperHalf)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(x));
  else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(r) : "r"(x));
  return r;
}
TILEWISE_DEVICE uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {  // sm_89
  uint32_t r;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(r)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return r;
}
TILEWISE_DEVICE float cvt_f32_f16(uint32_t x) {
  float y;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(y) : "r"(x));
  return y;
}
TILEWISE_DEVICE uint32_t cvt_tf32(float x) {  // sm_80
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
TILEWISE_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TILEWISE_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TILEWISE_DEVICE float rcp_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TILEWISE_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TILEWISE_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
TILEWISE_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
TILEWISE_DEVICE float tanh(float x) { return ::tanhf(x); }
TILEWISE_DEVICE float exp2_accurate(float x) { return ::exp2f(x); }
TILEWISE_DEVICE float log_accurate(float x) { return ::logf(x); }
TILEWISE_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
TILEWISE_DEVICE float float_of(uint32_t x) { return __uint_as_float(x); }
TILEWISE_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
TILEWISE_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
  return r;
}
template <uint32_t kBytes>
TILEWISE_DEVICE uint32_t prmt(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(kBytes));
  return r;
}
TILEWISE_DEVICE uint32_t spread_signs(uint32_t low, uint32_t high, int byte) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(0xCC88 + 0x1111 * byte));
  return r;
}

#endif

}  // namespace tilewise::cuda::ptx
