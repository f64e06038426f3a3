// Operands of float8_e4m3: bytes in shared memory that the multiplying warp converts exactly to
// fp16 in registers. A tile is addressed as one of 16-bit elements that each hold two adjacent
// columns, so 32 bytes of a row, one step of such a tile, are two steps of 16 columns.
#pragma once

#include "cuda/element.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tile {

// The four float8 numbers of a word as two pairs of fp16: by `cvt` (kConvert, sm_89), or by moving
// the bits to their places.
template <bool kConvert>
struct Float8Pairs {
  // A float8 number equals kUnit times its fp16 operand.
  static constexpr float kUnit = kConvert ? 1.0f : 256.0f;

  uint32_t first;
  uint32_t second;

  // Pairs (byte 0, byte 1) and (byte 2, byte 3).
  TILEWISE_DEVICE static Float8Pairs adjacent(uint32_t x) {
    if constexpr (!kConvert) return alternate(swapped(x));
    return {ptx::cvt_f16x2_e4m3x2<false>(x), ptx::cvt_f16x2_e4m3x2<true>(x)};
  }

  // Pairs (byte 0, byte 2) and (byte 1, byte 3).
  TILEWISE_DEVICE static Float8Pairs alternate(uint32_t x) {
    if constexpr (kConvert) return adjacent(swapped(x));
    // With the same bits, the bias of the exponent is 8 larger in fp16: hence the unit 2^8. 0x7f is
    // NaN: the carry turns its exponent into the one of fp16's NaN.
    const uint32_t magnitude = x & 0x7f7f7f7fu;
    const uint32_t finite = magnitude | ((magnitude + 0x01010101u) & 0x80808080u);
    return {(finite << 7 & 0x7f807f80u) | (x << 8 & 0x80008000u),
            (finite >> 1 & 0x7f807f80u) | (x & 0x80008000u)};
  }

 private:
  // Exchanges bytes 1 and 2.
  TILEWISE_DEVICE static uint32_t swapped(uint32_t x) { return ptx::prmt<0x3120>(x, x); }
};

// Loads 16 rows of an operand B that is stored [n][k], at two steps. Inside a step the summed index
// has the order that `pair_words` gives to operand A.
template <bool kConvert>
TILEWISE_DEVICE void load_float8(Fragment<F16>& first, Fragment<F16>& second,
                                 ptx::SharedAddress address) {
  uint32_t x[4];
  ptx::ldmatrix_x4(x, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto pairs = Float8Pairs<kConvert>::adjacent(x[i]);
    Fragment<F16>& f = i % 2 == 0 ? first : second;
    f.r[i / 2 * 2] = pairs.first;
    f.r[i / 2 * 2 + 1] = pairs.second;
  }
}

// Reorders the 16 columns of a step of A, in place, for load_float8. `first` and `second` are its
// two chunks of eight columns. The product reads word t of each chunk in lane t of a quad, and
// load_float8 gives this lane columns 4t to 4t + 3 of B: their words of A, 2t and 2t + 1, must be
// word t of the two chunks.
TILEWISE_DEVICE void pair_words(uint32_t (&first)[4], uint32_t (&second)[4]) {
  const uint32_t x[8] = {first[0],  first[1],  first[2],  first[3],
                         second[0], second[1], second[2], second[3]};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first[i] = x[2 * i];
    second[i] = x[2 * i + 1];
  }
}

// Loads 16 rows x 32 columns of an operand B that is stored [k][n]. Each 16 columns are permuted,
// even columns first, then odd ones; `pair_columns` accounts for this. `Offsets` is LaneOffsets or
// PanelOffsets with Lanes::rows_first.
template <bool kConvert, class Offsets>
class Float8B {
 public:
  TILEWISE_DEVICE explicit Float8B(int lane) : offsets_(lane) {}

  TILEWISE_DEVICE void load(Fragment<F16> (&f)[2], ptx::SharedAddress tile, int row,
                            int step) const {
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, offsets_.address(tile, row, step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pairs = Float8Pairs<kConvert>::alternate(x[i]);
      f[i / 2].r[i % 2] = pairs.first;
      f[i / 2].r[i % 2 + 2] = pairs.second;
    }
  }

 private:
  Offsets offsets_;
};

// --- float8 operands of wgmma -------------------------------------------------------------------

// A lane holds weights of columns 2t and 2t + 1 of each 8 keys, but operand A gives it the columns
// 4t to 4t + 3 and 16 + 4t to 19 + 4t of a step of 32. The sum over keys may have any order, so the
// weights stay in their lanes, and the values are stored in this order instead: column k of a step
// is this key of the step's 32.
TILEWISE_DEVICE constexpr int key_of_weight(int k) {
  const int t = k % 16 / 4;
  const int group = k / 16 * 2 + k % 4 / 2;  // of 8 keys
  return 8 * group + 2 * t + k % 2;
}

// Step `step` of 32 keys of a row's weights, rounded, as operand A.
template <int kColumns>
TILEWISE_DEVICE void float8_operand_of(uint32_t (&a)[4], const float (&row)[kColumns][4],
                                       int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const x = &row[4 * step + i / 2 * 2][i % 2 * 2];
    const float* const next = &row[4 * step + i / 2 * 2 + 1][i % 2 * 2];
    a[i] = ptx::cvt_e4m3x4(x[0], x[1], next[0], next[1]);
  }
}

// Brings sums over the values that Float8B loads into the column order of FourColumns. This only
// renames a lane's registers.
template <int kRows, int kColumns>
TILEWISE_DEVICE void pair_columns(Sums<kRows, kColumns>& o) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = o.x[m][n][2 * h + 1];
        o.x[m][n][2 * h + 1] = o.x[m][n + 1][2 * h];
        o.x[m][n + 1][2 * h] = x;
      }
    }
  }
}

}  // namespace tilewise::cuda::tile
