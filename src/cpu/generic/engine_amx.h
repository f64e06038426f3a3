// The engines of the AMX tile unit. Here rows of A are rows of memory, [m][unit], whereas the
// vector engines read A as [unit][m]; B is [unit][lane] for both.
#pragma once

#include "cpu/generic/amx_gemm.h"
#include "cpu/generic/engine.h"

namespace tilewise::cpu {
namespace {

// pack_rows_transposed for bf16, 32 columns at a time: one instruction interleaves two whole
// vectors of rows into 16 units, and each cache line is visited once. `padded_columns` is a
// multiple of 32.
template <class E>
TILEWISE_FN void pack_row_pairs_transposed(uint32_t* dst, int64_t ld, const BFloat16* const* rows,
                                           int64_t count, int64_t columns, int64_t padded_columns) {
  for (int64_t r = 0; r < count; r += 2 * W)
    for (int64_t column = 0; column < padded_columns; column += 2 * W) {
      U half[2][W];  // the first and the last four of every 8 columns
      for (int i = 0; i < W; ++i) {
        const U a = units_of_row<E>(rows[r + 2 * i], column, columns);
        const U b = units_of_row<E>(rows[r + 2 * i + 1], column, columns);
        half[0][i] = reinterpret_cast<U>(
            _mm512_unpacklo_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
        half[1][i] = reinterpret_cast<U>(
            _mm512_unpackhi_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
      }
      for (int h = 0; h < 2; ++h) {
        transpose(half[h]);
        for (int i = 0; i < W; ++i)
          store_as(dst + (column + i / 4 * 8 + i % 4 + 4 * h) * ld + r / 2, half[h][i]);
      }
    }
}

// bf16 operands as they are stored; weights are rounded to bf16 (see DotEngine).
template <Isa kIsa>
struct AmxEngine : DotEngine<kIsa> {
  using Session = TileSession;
  static constexpr Shape S = DotEngine<kIsa>::S;

  // dst[column][key / 2] with `ld` columns, padded with zeros, and `count` keys.
  TILEWISE_FN static void pack_rows_a(uint32_t* dst, int64_t ld, int64_t,
                                      const BFloat16* const* rows, int64_t count, int64_t columns) {
    pack_row_pairs_transposed<AmxEngine>(dst, count / S.pair, rows, count, columns, ld);
  }
  TILEWISE_FN static OperandA rows_a(const uint32_t* data, int64_t, int64_t count, int64_t plane) {
    return {data, count / S.pair, 1, plane};
  }

  TILEWISE_FN static void gemm(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                               OperandB b, int64_t vectors, int64_t units) {
    tile_gemm<1>(c, ldc, accumulate, a, m, b, vectors, units);
  }
};

// One instruction and a test, because this runs for every weight.
TILEWISE_FN bool all_finite(F x) {
  constexpr int kInfinitiesAndNans = 0x99;
  return _mm512_fpclass_ps_mask(reinterpret_cast<__m512>(x), kInfinitiesAndNans) == 0;
}

// fp32 as the sum of two bf16: x rounded, plus the remainder rounded. Together they have 16 bits of
// mantissa, which is exact for every fp16.
//
// An infinite or NaN x has the high part +-1 and x itself as its low part. With these, the sum of
// the part products is what IEEE defines for x y: the infinity meets the high part of y, which is 0
// only if y is, and never the low part of y, whose sign may differ.
struct Split {
  F high;
  F low;  // not rounded yet

  TILEWISE_FN static Split of(F x, F rounded) { return {rounded, x - rounded}; }
  TILEWISE_FN Split with_nonfinite() const {
    const I finite = low * 0.0f == 0.0f;
    return {finite ? high : (high < 0.0f ? splat(-1.0f) : splat(1.0f)), finite ? low : high};
  }
};

// Two vectors a and b as units: lane i of `high` holds the bf16 of a[i] and, in its upper half, of
// b[i].
struct SplitPairs {
  U high;
  U low;

  TILEWISE_FN static SplitPairs of(F a, F b) {
    const U rounded = interleave_bf16(a, b);
    const Split split_a = Split::of(a, reinterpret_cast<F>(rounded << 16));
    const Split split_b = Split::of(b, reinterpret_cast<F>(rounded & 0xffff0000u));
    if (__builtin_expect(!all_finite(split_a.low + split_b.low), 0))
      return with_nonfinite(split_a, split_b);
    return {rounded, interleave_bf16(split_a.low, split_b.low)};
  }

 private:
  __attribute__((noinline)) static SplitPairs with_nonfinite(Split a, Split b) {
    a = a.with_nonfinite();
    b = b.with_nonfinite();
    return {interleave_bf16(a.high, b.high), interleave_bf16(a.low, b.low)};
  }
};

// fp16 operands and weights as sums of two bf16 each: three products, hh + hl + lh.
template <Isa kIsa>
struct AmxSplitEngine {
  using Storage = Half;
  using Units = SplitPairs;
  using Session = TileSession;
  static constexpr Shape S = shape_of(kIsa, kDtype<Storage>);
  static constexpr int kPair = 2;
  static constexpr int kVectors = S.panel / W;

  TILEWISE_FN static Units along_columns(const Half* p) {
    // Neighbours in a row: even and odd columns as two vectors.
    const F first = to_fp32(p);
    const F second = to_fp32(p + W);
    return SplitPairs::of(__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18,
                                                  20, 22, 24, 26, 28, 30),
                          __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19,
                                                  21, 23, 25, 27, 29, 31));
  }
  TILEWISE_FN static Units along_rows(const Half* const* p) {
    return SplitPairs::of(to_fp32(p[0]), to_fp32(p[1]));
  }
  TILEWISE_FN static void store_units(uint32_t* dst, int64_t plane, const Units& u) {
    store_as(dst, u.high);
    store_as(dst + plane, u.low);
  }
  TILEWISE_FN static void transpose_units(Units (&block)[W]) {
    U part[W];
    for (int i = 0; i < W; ++i) part[i] = block[i].high;
    transpose(part);
    for (int i = 0; i < W; ++i) block[i].high = part[i];
    for (int i = 0; i < W; ++i) part[i] = block[i].low;
    transpose(part);
    for (int i = 0; i < W; ++i) block[i].low = part[i];
  }

  TILEWISE_FN static void negate(uint32_t* units, int64_t count) {
    for (int64_t i = 0; i < count; ++i) units[i] ^= 0x80008000u;
  }

  // As operand B the bf16 of two keys share a unit; as operand A those of two lanes do.
  TILEWISE_FN static void store_weights_b(uint32_t* b, int64_t plane, int64_t ld, int64_t key,
                                          int64_t lane, F w0, F w1) {
    store_units(b + key / 2 * ld + lane, plane, SplitPairs::of(w0, w1));
  }
  TILEWISE_FN static F rounding_of_weights(F w0, F w1) {
    const U high = interleave_bf16(w0, w1);
    return bf16_rounding(w0 - reinterpret_cast<F>(high << 16),
                         w1 - reinterpret_cast<F>(high & 0xffff0000u));
  }
  TILEWISE_FN static float weight_b(const uint32_t* b, int64_t plane, int64_t ld, int64_t key,
                                    int64_t lane) {
    const uint32_t* const at = b + key / 2 * ld + lane;
    return part_of(at[0], key) + part_of(at[plane], key);
  }
  TILEWISE_FN static float part_of(uint32_t unit, int64_t key) {
    return to_float(BFloat16{static_cast<uint16_t>(key % 2 == 0 ? unit : unit >> 16)});
  }

  TILEWISE_FN static void store_weights_a(uint32_t* a, int64_t plane, int64_t ld, int64_t key,
                                          int64_t lane, F w) {
    BFloat16* const at = reinterpret_cast<BFloat16*>(a + key * ld) + lane;
    from_fp32(at, w);
    Split parts = Split::of(w, to_fp32(at));
    if (__builtin_expect(!all_finite(parts.low), 0)) {
      parts = parts.with_nonfinite();
      from_fp32(at, parts.high);
    }
    from_fp32(at + 2 * plane, parts.low);
  }
  TILEWISE_FN static float weight_a(const uint32_t* a, int64_t plane, int64_t ld, int64_t key,
                                    int64_t lane) {
    return to_float(reinterpret_cast<const BFloat16*>(a + key * ld)[lane]) +
           to_float(reinterpret_cast<const BFloat16*>(a + plane + key * ld)[lane]);
  }

  TILEWISE_FN static void pack_rows_a(uint32_t* dst, int64_t ld, int64_t plane,
                                      const Half* const* rows, int64_t count, int64_t columns) {
    pack_rows_transposed<AmxSplitEngine>(dst, count / S.pair, plane, rows, count, columns, ld);
  }
  TILEWISE_FN static OperandA rows_a(const uint32_t* data, int64_t, int64_t count, int64_t plane) {
    return {data, count / S.pair, 1, plane};
  }

  TILEWISE_FN static void gemm(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                               OperandB b, int64_t vectors, int64_t units) {
    tile_gemm<2>(c, ldc, accumulate, a, m, b, vectors, units);
  }
};

}  // namespace
}  // namespace tilewise::cpu
