// Matrix engines: how storage becomes units, how weights become operands, and the product itself.
// fp32 FMA, bf16 dot products and AMX tiles differ only in their engine; the attention loops are
// written once for all of them.
#pragma once

#include "cpu/generic/gemm.h"
#include "cpu/generic/pack.h"

namespace tilewise::cpu {
namespace {

// Longest chain of additions in a product. With fp32 operands and head dimension 64, outputs are
// off by 1.2e-6 with chains of 64 and by 0.7e-6 with chains of 32; for 16-bit operands it makes no
// difference.
template <class T>
inline constexpr int64_t kChain = 128;
template <>
inline constexpr int64_t kChain<float> = 32;

template <class T>
inline constexpr int32_t kDtype = TILEWISE_FLOAT32;
template <>
inline constexpr int32_t kDtype<BFloat16> = TILEWISE_BFLOAT16;
template <>
inline constexpr int32_t kDtype<Half> = TILEWISE_FLOAT16;

// fp32 arithmetic for any storage type.
template <class T, Isa kIsa>
struct FmaEngine {
  using Storage = T;
  using Units = U;
  static constexpr Shape S = shape_of(kIsa, kDtype<Storage>);
  static constexpr int kPair = 1;
  static constexpr int kVectors = S.panel / W;
  struct Session {};  // set-up per work item: AMX tiles, or nothing

  TILEWISE_FN static Units along_columns(const T* p) {
    const F v = to_fp32(p);
    return load_as<U>(&v);
  }
  TILEWISE_FN static Units along_rows(const T* const* p) { return along_columns(p[0]); }
  TILEWISE_FN static void store_units(uint32_t* dst, int64_t, Units u) { store_as(dst, u); }
  TILEWISE_FN static void transpose_units(Units (&block)[W]) { transpose(block); }

  TILEWISE_FN static void negate(uint32_t* units, int64_t count) {
    for (int64_t i = 0; i < count; ++i) units[i] ^= 0x80000000u;
  }

  // Weights as operand B: [key][lane]. As operand A, with the contraction over lanes, the same
  // memory is used.
  TILEWISE_FN static void store_weights_b(uint32_t* b, int64_t, int64_t ld, int64_t key,
                                          int64_t lane, F w0, F w1) {
    store_as(b + key * ld + lane, w0);
    store_as(b + (key + 1) * ld + lane, w1);
  }
  TILEWISE_FN static float weight_b(const uint32_t* b, int64_t, int64_t ld, int64_t key,
                                    int64_t lane) {
    return load_as<float>(b + key * ld + lane);
  }
  TILEWISE_FN static void store_weights_a(uint32_t* a, int64_t, int64_t ld, int64_t key,
                                          int64_t lane, F w) {
    store_as(a + key * ld + lane, w);
  }
  TILEWISE_FN static float weight_a(const uint32_t* a, int64_t, int64_t ld, int64_t key,
                                    int64_t lane) {
    return load_as<float>(a + key * ld + lane);
  }

  TILEWISE_FN static void pack_rows_a(uint32_t* dst, int64_t ld, int64_t plane,
                                      const T* const* rows, int64_t count, int64_t columns) {
    pack_rows<FmaEngine>(dst, ld, plane, rows, count, columns);
  }
  TILEWISE_FN static OperandA rows_a(const uint32_t* data, int64_t ld, int64_t, int64_t plane) {
    return {data, 1, ld, plane};
  }

  TILEWISE_FN static void gemm(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                               OperandB b, int64_t vectors, int64_t units) {
    vector_gemm<Fma, S.rows, kVectors, kChain<T>>(c, ldc, accumulate, a, m, b, vectors, units);
  }
};

#if defined(TILEWISE_BF16_DOT)
// Two bf16 products per lane with fp32 sums.
template <Isa kIsa>
struct DotEngine {
  using Storage = BFloat16;
  using Units = U;
  static constexpr Shape S = shape_of(kIsa, kDtype<Storage>);
  static constexpr int kPair = 2;
  static constexpr int kVectors = S.panel / W;
  struct Session {};

  TILEWISE_FN static Units along_columns(const BFloat16* p) { return load_as<U>(p); }
  TILEWISE_FN static Units along_rows(const BFloat16* const* p) {
    return __builtin_convertvector(load_as<H>(p[0]), U) |
           (__builtin_convertvector(load_as<H>(p[1]), U) << 16);
  }
  TILEWISE_FN static void store_units(uint32_t* dst, int64_t, Units u) { store_as(dst, u); }
  TILEWISE_FN static void transpose_units(Units (&block)[W]) { transpose(block); }

  TILEWISE_FN static void negate(uint32_t* units, int64_t count) {
    for (int64_t i = 0; i < count; ++i) units[i] ^= 0x80008000u;
  }

  // As operand B the bf16 of two keys share a unit; as operand A those of two lanes do.
  TILEWISE_FN static void store_weights_b(uint32_t* b, int64_t, int64_t ld, int64_t key,
                                          int64_t lane, F w0, F w1) {
    store_as(b + key / 2 * ld + lane, interleave_bf16(w0, w1));
  }
  // The rounding error of w0 + w1 as stored.
  TILEWISE_FN static F rounding_of_weights(F w0, F w1) { return bf16_rounding(w0, w1); }
  TILEWISE_FN static float weight_b(const uint32_t* b, int64_t, int64_t ld, int64_t key,
                                    int64_t lane) {
    const uint32_t unit = b[key / 2 * ld + lane];
    return to_float(BFloat16{static_cast<uint16_t>(key % 2 == 0 ? unit : unit >> 16)});
  }
  TILEWISE_FN static void store_weights_a(uint32_t* a, int64_t, int64_t ld, int64_t key,
                                          int64_t lane, F w) {
    from_fp32(reinterpret_cast<BFloat16*>(a + key * ld) + lane, w);
  }
  TILEWISE_FN static float weight_a(const uint32_t* a, int64_t, int64_t ld, int64_t key,
                                    int64_t lane) {
    return to_float(reinterpret_cast<const BFloat16*>(a + key * ld)[lane]);
  }

  TILEWISE_FN static void pack_rows_a(uint32_t* dst, int64_t ld, int64_t plane,
                                      const BFloat16* const* rows, int64_t count, int64_t columns) {
    pack_rows<DotEngine>(dst, ld, plane, rows, count, columns);
  }
  TILEWISE_FN static OperandA rows_a(const uint32_t* data, int64_t ld, int64_t, int64_t plane) {
    return {data, 1, ld, plane};
  }

  TILEWISE_FN static void gemm(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                               OperandB b, int64_t vectors, int64_t units) {
    vector_gemm<Dot, S.rows, kVectors, kChain<BFloat16>>(c, ldc, accumulate, a, m, b, vectors,
                                                         units);
  }
};
#endif

}  // namespace
}  // namespace tilewise::cpu
