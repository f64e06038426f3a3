// The sums of a product as operands of the next one: a warp keeps its own in registers, and stores
// them in shared memory for the other warps.
#pragma once

#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tile {

// Operand A of 16 * kRows rows and kSteps steps, kept as elements: fp32 is split into tf32 numbers
// at each use.
template <class Element, int kRows, int kSteps>
struct Operands {
  uint32_t r[kSteps][kRows][4];

  // Sets columns [8n, 8n + 8) of rows [16m, 16m + 16) from the lane's sums `x`.
  TILEWISE_DEVICE void set(int m, int n, const float (&x)[4]) {
    if constexpr (Element::kBytes == 2) {
      r[n / 2][m][n % 2 * 2] = pack<Element>(x[0], x[1]);
      r[n / 2][m][n % 2 * 2 + 1] = pack<Element>(x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[n][m][i] = ptx::bits_of(x[i % 2 * 2 + i / 2]);
    }
  }

  TILEWISE_DEVICE Fragment<Element> at(int step, int m) const {
    Fragment<Element> f;
#pragma unroll
    for (int i = 0; i < 4; ++i) f.r[i] = r[step][m][i];
    split(f);
    return f;
  }
};

// The addresses at which a lane stores its words of Operands, and those at which `load` then
// returns the same fragments. A row is one period of the swizzle. Chunks have 16 bytes, two per
// step, and are counted from the warp's first one by xor, which equals addition inside the warp's
// region.
template <int kRowBytes>
class OperandOffsets {
 public:
  static_assert(Swizzle<kRowBytes>::kPeriod * 16 == kRowBytes);

  // The warp's region starts at `row` (a multiple of 16) and at `chunk`, a multiple of the region's
  // width, which is a power of 2.
  TILEWISE_DEVICE OperandOffsets(int lane, int row, int chunk)
      : word_(Swizzle<kRowBytes>::offset(row + lane / 4, chunk) +
              static_cast<uint32_t>(lane % 4 * 4)),
        row_(Swizzle<kRowBytes>::offset(row + (lane & 15), (chunk & ~1) + (lane >> 4))) {}

  TILEWISE_DEVICE OperandOffsets opaque() const {
    OperandOffsets o = *this;
    o.word_ = ptx::opaque(word_);
    o.row_ = ptx::opaque(row_);
    return o;
  }

  // The lane's word r[2 * (chunk % 2) + row / 8 % 2] of a fragment.
  TILEWISE_DEVICE uint32_t word(int row, int chunk) const {
    return (word_ ^ static_cast<uint32_t>(chunk * 16)) + static_cast<uint32_t>(row * kRowBytes);
  }
  // The address to pass to `load` for a step of 16 rows.
  TILEWISE_DEVICE uint32_t rows(int row, int step) const {
    return (row_ ^ static_cast<uint32_t>(step * 32)) + static_cast<uint32_t>(row * kRowBytes);
  }

 private:
  uint32_t word_;
  uint32_t row_;
};

// Addresses in an operand B that is stored [n][k], for loads of eight rows at two steps: the steps
// are the halves of one fragment.
template <int kRowBytes>
class StepPairOffsets {
 public:
  static_assert(Swizzle<kRowBytes>::kPeriod == 8);

  TILEWISE_DEVICE explicit StepPairOffsets(int lane, int first_step = 0) {
    for (int i = 0; i < 2; ++i)
      base_[i] = Swizzle<kRowBytes>::offset(lane & 7, 2 * first_step + 4 * i + (lane >> 3));
  }

  // Steps 2 * pair and 2 * pair + 1, from `first_step` on, which is a multiple of 4.
  TILEWISE_DEVICE uint32_t at(int row, int pair) const {
    return base_[pair % 2] + static_cast<uint32_t>(pair / 2 * 128 + row * kRowBytes);
  }

 private:
  uint32_t base_[2];
};

}  // namespace tilewise::cuda::tile
