// The vector vocabulary of the CPU kernels: GCC/Clang vector extensions with W lanes of fp32, and a
// few intrinsics where an instruction does better. Included once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push  // GCC's own headers leave "undefined" vectors uninitialised
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "base/float8.h"
#include "base/half.h"
#include "base/math.h"

namespace tilewise::cpu {
namespace {

#if defined(__AVX512F__)
inline constexpr int W = 16;
#elif defined(__AVX2__)
inline constexpr int W = 8;
#else
inline constexpr int W = 4;
#endif

// Vector registers.
#if defined(__AVX512F__) || defined(__ARM_NEON)
inline constexpr int kRegisters = 32;
#else
inline constexpr int kRegisters = 16;
#endif

// Whether the compiler fuses a product and a sum into one instruction with one rounding.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline constexpr bool kHasFma = true;
#else
inline constexpr bool kHasFma = false;
#endif

using F = float __attribute__((vector_size(W * 4)));
using I = int32_t __attribute__((vector_size(W * 4)));
using U = uint32_t __attribute__((vector_size(W * 4)));
using H = uint16_t __attribute__((vector_size(W * 2)));
using H2 = uint16_t __attribute__((vector_size(W * 4)));
using U64 = uint64_t __attribute__((vector_size(W * 8)));
using D = double __attribute__((vector_size(W * 8)));

TILEWISE_FN F splat(float x) { return F{} + x; }

// `Memory` is a pointer, or an array, whose size is then checked against that of the vector.
template <class V, class Memory>
inline constexpr bool kFits = !std::is_array_v<Memory> || sizeof(V) <= sizeof(Memory);

template <class V, class Memory>
TILEWISE_FN V load_as(const Memory& from) {
  static_assert(kFits<V, Memory>, "reads past the end of an array");
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
template <class Memory, class V>
TILEWISE_FN void store_as(Memory&& to, V v) {
  static_assert(kFits<V, std::remove_reference_t<Memory>>, "writes past the end of an array");
  __builtin_memcpy(to, &v, sizeof(v));
}
TILEWISE_FN F load(const float* p) { return load_as<F>(p); }
TILEWISE_FN void store(float* p, F v) { store_as(p, v); }

// The larger of the two; b when a is NaN.
TILEWISE_FN F vmax(F a, F b) {
#if defined(__AVX512F__)
  return reinterpret_cast<F>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<F>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

TILEWISE_FN bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) !=
         0;
#elif defined(__AVX2__)
  return _mm256_testz_si256(reinterpret_cast<__m256i>(mask), reinterpret_cast<__m256i>(mask)) == 0;
#elif defined(__ARM_NEON)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all |= mask[i];
  return all != 0;
#endif
}

TILEWISE_FN float max_lane(F v) {
  float highest = v[0];
  for (int i = 1; i < W; ++i) highest = max(highest, v[i]);
  return highest;
}

TILEWISE_FN I lane_numbers() {
  I numbers;
  for (int i = 0; i < W; ++i) numbers[i] = i;
  return numbers;
}

TILEWISE_FN float sum_lanes(F v) {
  // A fixed order of additions, so that the result does not depend on the compiler.
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

// 2^x for the softmax, x <= 127; 0 for -inf, NaN for NaN. The minimax polynomials were fitted for
// this project: maximum relative error 7.5e-5, 2.6e-6, 7.5e-8 for degree 3, 4, 5.
template <int Degree>
TILEWISE_FN F exp2(F x) {
#if defined(__AVX512DQ__)
  constexpr float c[3][6] = {
      {0.9999252f, 0.6958335f, 0.22606717f, 0.07802452f, 0.0f, 0.0f},
      {1.0000026f, 0.69300383f, 0.24144275f, 0.052011464f, 0.013534168f, 0.0f},
      {0.99999994f, 0.6931531f, 0.24015361f, 0.055826318f, 0.008989341f, 0.0018775767f}};
  const __m512 x512 = reinterpret_cast<__m512>(x);
  // x - floor(x); 0 for an infinity. scalef multiplies by 2^floor(x).
  const F f = reinterpret_cast<F>(_mm512_reduce_ps(x512, 0x09));
  F p = splat(c[Degree - 3][Degree]);
  for (int i = Degree - 1; i >= 0; --i) p = p * f + c[Degree - 3][i];
  return reinterpret_cast<F>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), x512));
#else
  constexpr float c[3][6] = {
      {0.99992806f, 0.69326097f, 0.24261113f, 0.05517167f, 0.0f, 0.0f},
      {0.9999993f, 0.6931218f, 0.24024744f, 0.055917863f, 0.009570102f, 0.0f},
      {1.0000001f, 0.69314694f, 0.2402212f, 0.05550713f, 0.009675542f, 0.0013276472f}};
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  x = vmax(splat(-127.0f), x);
  const F rounded = x + magic;
  const F f = x - (rounded - magic);
  F p = splat(c[Degree - 3][Degree]);
  for (int i = Degree - 1; i >= 0; --i) p = p * f + c[Degree - 3][i];
  // At -127 the exponent field becomes 0: the product is 0.
  const I power = (load_as<I>(&rounded) - 0x4b400000 + 127) << 23;
  return p * load_as<F>(&power);
#endif
}

// Relative error below 4e-7: odd polynomial up to 0.625, then 1 - 2 / (e^2|x| + 1).
TILEWISE_FN F tanh(F x) {
  const F a = x < 0.0f ? -x : x;
  const F t = x * x;
  F small = splat(-0.005659989f);
  for (float c : {0.020590989f, -0.053721067f, 0.13331127f, -0.3333326f}) small = small * t + c;
  small = small * t * x + x;
  const F bounded = a > 20.0f ? splat(20.0f) : a;
  const F large = 1.0f - 2.0f / (exp2<5>(bounded * 2.8853900817779268f) + 1.0f);
  const F signed_large = x < 0.0f ? -large : large;
  return a < 0.625f ? small : signed_large;
}

// The functions that the policies need (attention/scalar_math.h), on vectors.
struct VectorMath {
  TILEWISE_FN static F tanh(F x) { return cpu::tanh(x); }
  TILEWISE_FN static void mul_high_low(U a, uint32_t b, U* high, U* low) {
    const U64 product = __builtin_convertvector(a, U64) * static_cast<uint64_t>(b);
    *high = __builtin_convertvector(product >> 32, U);
    *low = __builtin_convertvector(product, U);
  }
  TILEWISE_FN static U swap_bytes_of_halves(U x) {
    return (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
  }
};

// W elements of storage as fp32, and back with round to nearest even.
TILEWISE_FN F to_fp32(const float* p) { return load(p); }

TILEWISE_FN F to_fp32(const BFloat16* p) {
  const U bits = __builtin_convertvector(load_as<H>(p), U) << 16;
  return load_as<F>(&bits);
}

TILEWISE_FN F to_fp32(const Half* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<F>(_mm512_cvtph_ps(load_as<__m256i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<F>(_mm256_cvtph_ps(load_as<__m128i>(p)));
#elif defined(__ARM_NEON)
  return reinterpret_cast<F>(vcvt_f32_f16(load_as<float16x4_t>(p)));
#else
  F v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

// The same conversion as for scalars (base/float8.h). Machines that convert fp16 use this: the bits
// of a float8_e4m3, shifted left by seven, are an fp16 number that is 2^8 times smaller, also for
// subnormal numbers.
#if defined(__AVX2__) || defined(__AVX512F__) || defined(__ARM_NEON)
inline constexpr float kFloat8Unit = 256.0f;

template <class Halves>
TILEWISE_FN Halves half_of_float8(Halves with_copies_of_the_sign) {
  constexpr uint16_t kSign = 0x8000;
  constexpr uint16_t kNoNumber = 0xbf80;  // the bits of -480, which are NaN in e4m3
  const Halves bits = (with_copies_of_the_sign << 7) & kNoNumber;
  return (bits | kSign) == kNoNumber ? ~Halves{} : bits;  // fp16's own NaN
}

TILEWISE_FN F to_fp32(const Float8* p) {
#if defined(__AVX512F__)
  const H bits = half_of_float8(reinterpret_cast<H>(_mm256_cvtepi8_epi16(load_as<__m128i>(p))));
#elif defined(__AVX2__)
  const H bits = half_of_float8(reinterpret_cast<H>(_mm_cvtepi8_epi16(_mm_loadu_si64(p))));
#else
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(load_as<uint32_t>(p)));
  const H bits = half_of_float8(reinterpret_cast<H>(vget_low_s16(vmovl_s8(bytes))));
#endif
  return to_fp32(reinterpret_cast<const Half*>(&bits)) * kFloat8Unit;
}

// Shuffles in registers: reading part of a vector through its address would first write it to
// memory.
template <int... J>
TILEWISE_FN void to_fp32(H2 halves, F (&part)[2], std::integer_sequence<int, J...>) {
  const H low = __builtin_shufflevector(halves, halves, J...);
  const H high = __builtin_shufflevector(halves, halves, (W + J)...);
  part[0] = to_fp32(reinterpret_cast<const Half*>(&low));
  part[1] = to_fp32(reinterpret_cast<const Half*>(&high));
}

// 2 W elements, divided by kFloat8Unit.
TILEWISE_FN void to_fp32_units(const Float8* p, F (&part)[2]) {
#if defined(__AVX512F__)
  const H2 bits = half_of_float8(reinterpret_cast<H2>(_mm512_cvtepi8_epi16(load_as<__m256i>(p))));
#elif defined(__AVX2__)
  const H2 bits = half_of_float8(reinterpret_cast<H2>(_mm256_cvtepi8_epi16(load_as<__m128i>(p))));
#else
  const H2 bits = half_of_float8(reinterpret_cast<H2>(vmovl_s8(load_as<int8x8_t>(p))));
#endif
  to_fp32(bits, part, std::make_integer_sequence<int, W>{});
}
#else
inline constexpr float kFloat8Unit = 1.0f;

TILEWISE_FN F to_fp32(const Float8* p) {
  U bits;
  for (int i = 0; i < W; ++i) bits[i] = p[i].bits;
  const U magnitude = bits & 0x7fu;
  const U exponent = magnitude >> 3;
  const U normal = exponent != 0u ? U{} + 1u : U{};
  const I mantissa = __builtin_convertvector((magnitude & 7u) + (normal << 3), I);
  const U step = (exponent + (1u - normal) + (127 - 10)) << 23;
  const F value = __builtin_convertvector(mantissa, F) * load_as<F>(&step);
  const U known = magnitude == 0x7fu ? U{} + 0x7fc00000u : load_as<U>(&value);
  const U with_sign = known | ((bits & 0x80u) << 24);
  return load_as<F>(&with_sign);
}

TILEWISE_FN void to_fp32_units(const Float8* p, F (&part)[2]) {
  for (int i = 0; i < 2; ++i) part[i] = to_fp32(p + i * W);
}
#endif

TILEWISE_FN U bf16_bits(F v) {  // in the low halves
  const U u = load_as<U>(&v);
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded;
}

TILEWISE_FN void from_fp32(float* p, F v) { store(p, v); }

TILEWISE_FN void from_fp32(BFloat16* p, F v) {
#if defined(__AVX512BF16__)
  store_as(p, _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  store_as(p, vcvt_bf16_f32(reinterpret_cast<float32x4_t>(v)));
#else
  store_as(p, __builtin_convertvector(bf16_bits(v), H));
#endif
}

// Lane i holds the bf16 of low[i] and, above it, of high[i].
TILEWISE_FN U interleave_bf16(F low, F high) {
#if defined(__AVX512BF16__)
  const H2 halves = reinterpret_cast<H2>(
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
  return reinterpret_cast<U>(__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                                     20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26,
                                                     11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const H first = reinterpret_cast<H>(vcvt_bf16_f32(reinterpret_cast<float32x4_t>(low)));
  const H second = reinterpret_cast<H>(vcvt_bf16_f32(reinterpret_cast<float32x4_t>(high)));
  return reinterpret_cast<U>(__builtin_shufflevector(first, second, 0, 4, 1, 5, 2, 6, 3, 7));
#else
  return bf16_bits(low) | (bf16_bits(high) << 16);
#endif
}

// The error of low + high, in each lane, after both were rounded to bf16.
TILEWISE_FN F bf16_rounding(F low, F high) {
  const U rounded = interleave_bf16(low, high);
  return (reinterpret_cast<F>(rounded << 16) - low) +
         (reinterpret_cast<F>(rounded & 0xffff0000u) - high);
}

// Instructions for pairs of bf16. `dot_bf16` adds to each lane of `sum` the two products of the
// bf16 in that lane of a and b. `pairs_low` interleaves the first four of every 8 numbers of a and
// b, `pairs_high` the last four.
#if defined(__AVX512BF16__)
#define TILEWISE_BF16_DOT 1
TILEWISE_FN F dot_bf16(F sum, H2 a, H2 b) {
  return reinterpret_cast<F>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
TILEWISE_FN H2 pairs_low(H2 a, H2 b) {
  return reinterpret_cast<H2>(
      _mm512_unpacklo_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
TILEWISE_FN H2 pairs_high(H2 a, H2 b) {
  return reinterpret_cast<H2>(
      _mm512_unpackhi_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TILEWISE_BF16_DOT 1
TILEWISE_FN F dot_bf16(F sum, H2 a, H2 b) {
  return reinterpret_cast<F>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum),
                                         reinterpret_cast<bfloat16x8_t>(a),
                                         reinterpret_cast<bfloat16x8_t>(b)));
}
TILEWISE_FN H2 pairs_low(H2 a, H2 b) {
  return reinterpret_cast<H2>(
      vzip1q_u16(reinterpret_cast<uint16x8_t>(a), reinterpret_cast<uint16x8_t>(b)));
}
TILEWISE_FN H2 pairs_high(H2 a, H2 b) {
  return reinterpret_cast<H2>(
      vzip2q_u16(reinterpret_cast<uint16x8_t>(a), reinterpret_cast<uint16x8_t>(b)));
}
#endif

TILEWISE_FN void from_fp32(Half* p, F v) {
#if defined(__AVX512F__)
  store_as(p, _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  store_as(p, _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
  store_as(p, vcvt_f16_f32(reinterpret_cast<float32x4_t>(v)));
#else
  for (int i = 0; i < W; ++i) p[i] = from_float<Half>(v[i]);
#endif
}

// Copies the first n elements, 0 <= n < N, and sets the rest to 0; memory past them is not read.
// Where byte masks exist they are used: a loop took a quarter of the time of decoding D72 in bf16.
template <class T, int N>
TILEWISE_FN void copy_first(T (&to)[N], const T* from, int64_t n) {
#if defined(__AVX512BW__)
  const uint64_t bytes = (uint64_t{1} << (n * static_cast<int64_t>(sizeof(T)))) - 1;
  if constexpr (sizeof(to) == 64) {
    store_as(to, _mm512_maskz_loadu_epi8(bytes, from));
  } else if constexpr (sizeof(to) == 32) {
    store_as(to, _mm256_maskz_loadu_epi8(static_cast<__mmask32>(bytes), from));
  } else {
    static_assert(sizeof(to) <= 16);
    const __m128i first = _mm_maskz_loadu_epi8(static_cast<__mmask16>(bytes), from);
    __builtin_memcpy(to, &first, sizeof(to));  // fewer than 16 bytes for narrow steps
  }
#else
  for (int64_t i = 0; i < N; ++i) to[i] = i < n ? from[i] : T{};
#endif
}

template <class T>
TILEWISE_FN F to_fp32_tail(const T* p, int64_t n) {
  T buffer[W];
  copy_first(buffer, p, n);
  return to_fp32(buffer);
}
template <class T>
TILEWISE_FN void from_fp32_tail(T* p, F v, int64_t n) {
  T buffer[W];
  from_fp32(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

namespace detail {
// Exchanges the off-diagonal S x S blocks of a pair of rows.
template <int S, class V, int... J>
TILEWISE_FN void exchange(V& a, V& b, std::integer_sequence<int, J...>) {
  const V low = __builtin_shufflevector(a, b, ((J & S) ? W + J - S : J)...);
  const V high = __builtin_shufflevector(a, b, ((J & S) ? W + J : J + S)...);
  a = low;
  b = high;
}
template <int S, class V>
TILEWISE_FN void exchange_rows(V (&r)[W]) {
  for (int i = 0; i < W; ++i)
    if (!(i & S)) exchange<S>(r[i], r[i + S], std::make_integer_sequence<int, W>{});
}
}  // namespace detail

// Sums over groups of S * N lanes whose lanes already are sums of S, as a transpose that adds on
// the way: lane i belongs to row i / S % N.
template <int S, int kStep = 1, int N>
TILEWISE_FN F sum_of_rows(F (&r)[N]) {
  for (int i = 0; i + kStep < N; i += 2 * kStep) {
    detail::exchange<S>(r[i], r[i + kStep], std::make_integer_sequence<int, W>{});
    r[i] = r[i] + r[i + kStep];
  }
  if constexpr (2 * kStep < N)
    return sum_of_rows<2 * S, 2 * kStep>(r);
  else
    return r[0];
}

template <class V>
TILEWISE_FN void transpose(V (&r)[W]) {
  detail::exchange_rows<1>(r);
  detail::exchange_rows<2>(r);
  if constexpr (W > 4) detail::exchange_rows<4>(r);
  if constexpr (W > 8) detail::exchange_rows<8>(r);
}

}  // namespace
}  // namespace tilewise::cpu
