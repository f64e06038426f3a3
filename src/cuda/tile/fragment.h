// Operands of mma.sync, and sums of mma.sync and wgmma, for every element type.
//
// One step of a product takes 32 bytes of a row: 16 elements of 16 bits or 8 of 32 bits. A Fragment
// holds, for one step, 16 rows of A, or 16 columns of B as two 8-column operands (r[0], r[1]) and
// (r[2], r[3]).
//
// The order of the summed index inside a step is free as long as A and B agree. 4-byte elements
// that come from sums (`operand_of`) or are read transposed (`TransposedOffsets`) have index 2t in
// the place of t and 2t + 1 in the place of t + 4. So a lane multiplies the elements that it has
// summed.
#pragma once

#include <type_traits>

#include "cuda/element.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/shared_tile.h"

namespace tilewise::cuda::tile {

template <class Element>
inline constexpr int kStep = 32 / Element::kBytes;  // elements of the summed index per step

template <class Element>
struct Fragment {
  uint32_t r[4];
};

// fp32 as the sum of two tf32 numbers.
template <>
struct Fragment<F32> {
  uint32_t r[4];
  uint32_t low[4];
};

// Rounds r to tf32 (a product would truncate it). F32 keeps the rest in `low`.
template <class Element>
TILEWISE_DEVICE void split(Fragment<Element>&) {}

template <>
TILEWISE_DEVICE void split(Fragment<F32>& f) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t high = (f.r[i] + 0x1000u) & 0xffffe000u;
    f.low[i] = ptx::bits_of(ptx::float_of(f.r[i]) - ptx::float_of(high));
    f.r[i] = high;
  }
}

template <>
TILEWISE_DEVICE void split(Fragment<Tf32>& f) {
  for (uint32_t& x : f.r) x = ptx::cvt_tf32(ptx::float_of(x));
}

// Prepares the bits of an fp32 number that many warps split, so that split_presplit needs two
// instructions instead of three and returns the same parts as `split`. The result is bits + 2^12:
// its upper 19 bits are the rounded high part, the only ones that a product reads, and the lower 13
// bits are the rest in units of the last place, plus 2^12. Where the high part rounds up to a power
// of 2, these units are twice as large.
TILEWISE_DEVICE uint32_t presplit(uint32_t x) {
  const uint32_t y = x + 0x1000u;
  const bool carried = ((x ^ y) & 0xff800000u) != 0;
  if (carried && x << 1 >= 0xff000000u) return x;  // NaN stays NaN
  return carried ? y + 0x800u - ((y & 0xfffu) + 1) / 2 : y;
}

template <class Element>
TILEWISE_DEVICE void split_presplit(Fragment<Element>& f) {
  split(f);
}

template <>
TILEWISE_DEVICE void split_presplit(Fragment<F32>& f) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t high = ptx::and_or(f.r[i], 0xffffe000u, 0x1000u);
    f.low[i] = ptx::bits_of(ptx::float_of(f.r[i]) - ptx::float_of(high));
  }
}

// --- loads ---

// Loads 16 rows of operand A, or 16 rows of an operand B that is stored [n][k], at one step.
template <class Element>
TILEWISE_DEVICE Fragment<Element> load(ptx::SharedAddress address) {
  Fragment<Element> f;
  ptx::ldmatrix_x4(f.r, address);
  split(f);
  return f;
}

// The same for a tile whose fp32 elements went through `presplit`.
template <class Element>
TILEWISE_DEVICE Fragment<Element> load_presplit(ptx::SharedAddress address) {
  Fragment<Element> f;
  ptx::ldmatrix_x4(f.r, address);
  split_presplit(f);
  return f;
}

// Loads operands from a tile whose rows are the summed index, by LaneOffsets for 16-bit elements
// and GatherOffsets for 32-bit ones. `row` and `step` have the meaning of these classes; a step is
// 16 columns.
template <class Element, int kRowBytes, Lanes kLanes>
class TransposedOffsets {
 public:
  TILEWISE_DEVICE explicit TransposedOffsets(int lane, int first_step = 0)
      : offsets_(lane, first_step) {}

  TILEWISE_DEVICE TransposedOffsets opaque() const {
    TransposedOffsets o = *this;
    if constexpr (Element::kBytes == 4) o.offsets_ = offsets_.opaque();
    return o;
  }

  template <bool kPresplit = false>
  TILEWISE_DEVICE Fragment<Element> load(ptx::SharedAddress tile, int row, int step) const {
    Fragment<Element> f;
    if constexpr (Element::kBytes == 2) {
      ptx::ldmatrix_x4_trans(f.r, tile + offsets_.at(row, step));
    } else {
      for (int i = 0; i < 4; ++i) {
        // B: (column g, rows 2t and 2t + 1), then column g + 8. A: row by row.
        const bool is_b = kLanes == Lanes::rows_first;
        f.r[i] = ptx::ld_shared_b32(
            tile + offsets_.at(row, step, is_b ? i / 2 : i % 2, is_b ? i % 2 : i / 2));
      }
      if constexpr (kPresplit)
        split_presplit(f);
      else
        split(f);
    }
    return f;
  }
  // The same when first_step is 0, in fewer registers.
  TILEWISE_DEVICE Fragment<Element> load_whole(ptx::SharedAddress tile, int row, int step) const {
    if constexpr (Element::kBytes == 2) {
      Fragment<Element> f;
      ptx::ldmatrix_x4_trans(f.r, offsets_.address(tile, row, step));
      return f;
    } else {
      return load(tile, row, step);
    }
  }

 private:
  template <int kBytes, int = 0>
  struct Choose {
    using Type = LaneOffsets<kRowBytes, kLanes>;
  };
  template <int kUnused>
  struct Choose<4, kUnused> {
    using Type = GatherOffsets<kRowBytes>;
  };
  typename Choose<Element::kBytes>::Type offsets_;
};

// B stored [k][n]: kStep rows x 16 columns.
template <class Element, int kRowBytes>
using TransposedB = TransposedOffsets<Element, kRowBytes, Lanes::rows_first>;
// A stored [k][m]: kStep rows x 16 columns of the tile, which are 16 rows of A.
template <class Element, int kRowBytes>
using TransposedA = TransposedOffsets<Element, kRowBytes, Lanes::chunks_first>;

// --- sums ---

// kRows x 16 rows and kColumns x 8 columns of fp32 sums. With g = lane / 4, t = lane % 4,
// x[m][n][0..3] is (16m + g, 8n + 2t), (16m + g, 8n + 2t + 1), and the same in row 16m + g + 8.
template <int kRows, int kColumns>
struct Sums {
  static constexpr int kCount = kRows * kColumns * 4;

  float x[kRows][kColumns][4];

  // The sums as one array, for wgmma.
  TILEWISE_DEVICE float (&flat()) [kCount] { return reinterpret_cast<float (&)[kCount]>(x); }

  // Adds `other`, of kOtherColumns x 8 columns, to the columns from 8 * column on.
  template <int kOtherColumns>
  TILEWISE_DEVICE void add(const Sums<kRows, kOtherColumns>& other, int column) {
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int n = 0; n < kOtherColumns; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][column + n][e] += other.x[m][n][e];
  }
  TILEWISE_DEVICE void fill(float value) {
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = value;
  }
};

// The columns that a lane holds of tile n of its sums: of_lane(2t) + of_tile(n) and the next one.
// TwoColumns: two adjacent columns out of eight. FourColumns: in two tiles together, four adjacent
// columns out of sixteen.
struct TwoColumns {
  TILEWISE_DEVICE static constexpr int of_lane(int column) { return column; }
  TILEWISE_DEVICE static constexpr int of_tile(int n) { return 8 * n; }
};
struct FourColumns {
  TILEWISE_DEVICE static constexpr int of_lane(int column) { return 2 * column; }
  TILEWISE_DEVICE static constexpr int of_tile(int n) { return n / 2 * 16 + n % 2 * 2; }
};

// Packs two floats as 16-bit elements, the lower column in the low half.
template <class Element>
TILEWISE_DEVICE uint32_t pack(float low, float high) {
  static_assert(Element::kBytes == 2);
  if constexpr (Element::kDtype == F16::kDtype)
    return ptx::cvt_f16x2(low, high);
  else
    return ptx::cvt_bf16x2(low, high);
}

// The inverse of `pack`: the float in the low and in the high half of `pair`.
template <class Element>
TILEWISE_DEVICE float low_of(uint32_t pair) {
  if constexpr (Element::kDtype == F16::kDtype)
    return ptx::cvt_f32_f16(pair);
  else
    return ptx::float_of(pair << 16);
}
template <class Element>
TILEWISE_DEVICE float high_of(uint32_t pair) {
  if constexpr (Element::kDtype == F16::kDtype)
    return ptx::cvt_f32_f16(pair >> 16);
  else
    return ptx::float_of(pair & 0xffff0000u);
}

// Step `step` of 16 rows of sums as the A operand of the next product.
template <class Element, int kColumns>
TILEWISE_DEVICE Fragment<Element> operand_of(const float (&row)[kColumns][4], int step) {
  Fragment<Element> f;
  if constexpr (Element::kBytes == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&x)[4] = row[2 * step + i / 2];
      f.r[i] = pack<Element>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) f.r[i] = ptx::bits_of(row[step][i % 2 * 2 + i / 2]);
    split(f);
  }
  return f;
}

// Steps that tensor cores sum up, from zero, before fp32 additions take over; 0: all of them.
// Tensor cores truncate their sums instead of rounding them: over the 6000 steps of a long fp32 row
// that is a bias of 1e-4, and with four steps in the core an fp32 out was up to 1.2 times as far
// off as it may be.
template <class Element>
inline constexpr int kStepsInCore = std::is_same_v<Element, F32> ? 2 : 0;

// Instructions per product: fp32 takes three (3xTF32), the small products first.
template <class Element>
inline constexpr int kTerms = std::is_same_v<Element, F32> ? 3 : 1;

// Term `term` of d += a b for the 8 columns of half `half` of b, summed in the tensor core.
template <class Arch, class Element>
TILEWISE_DEVICE void multiply_term(float (&d)[4], const Fragment<Element>& a,
                                   const Fragment<Element>& b, int half,
                                   [[maybe_unused]] int term) {
  const uint32_t b0 = b.r[2 * half];
  const uint32_t b1 = b.r[2 * half + 1];
  if constexpr (Element::kDtype == BF16::kDtype) {
    ptx::mma_m16n8k16_bf16(d, a.r, b0, b1);
  } else if constexpr (Element::kDtype == F16::kDtype && Arch::kWideMma) {
    ptx::mma_m16n8k16_f16(d, a.r, b0, b1);
  } else if constexpr (Element::kDtype == F16::kDtype) {
    ptx::mma_m16n8k8_f16(d, a.r[0], a.r[1], b0);
    ptx::mma_m16n8k8_f16(d, a.r[2], a.r[3], b1);
  } else if constexpr (requires { a.low; }) {
    if (term == 0) ptx::mma_m16n8k8_tf32(d, a.low, b0, b1);
    if (term == 1) ptx::mma_m16n8k8_tf32(d, a.r, b.low[2 * half], b.low[2 * half + 1]);
    if (term == 2) ptx::mma_m16n8k8_tf32(d, a.r, b0, b1);
  } else {
    ptx::mma_m16n8k8_tf32(d, a.r, b0, b1);
  }
}

}  // namespace tilewise::cuda::tile
