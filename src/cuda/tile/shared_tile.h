// Tiles in shared memory, and the addresses at which a lane reads them.
#pragma once

#include <numeric>

#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::tile {

// The 16-byte chunks of a row are permuted by the row number, so that the eight rows of an 8x8
// matrix lie in different banks for every row length. Rows whose length is a multiple of 128 bytes
// permute eight chunks, other rows fewer. Tiles start at multiples of 128 bytes.
template <int kRowBytes>
struct Swizzle {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPeriod = std::gcd(kChunks, 8);

  TILEWISE_DEVICE static uint32_t offset(int row, int chunk) {
    const int permuted = chunk ^ ((row / (8 / kPeriod)) & (kPeriod - 1));
    return static_cast<uint32_t>(row * kRowBytes + permuted * 16);
  }
};

// How the lanes of a warp cover 16 rows x 32 bytes, the four 8x8 matrices of one ldmatrix.x4.
enum class Lanes {
  rows_first,    // (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1): A, and transposed B
  chunks_first,  // (rows 0-7, chunk 0), (0-7, 1), (8-15, 0), (8-15, 1): B, and transposed A
};

// `opaque()` of the address classes here and in the other headers of this folder is for long loops:
// addresses that follow from the result by xor are then computed in every step instead of being
// kept in registers. LaneOffsets does not need it, because its `at` only adds immediates.

// Addresses of a lane in a tile. Rows are multiples of 8, columns are steps of 32 bytes from
// `first_step` on. With unrolled loops everything except base_ is an immediate.
template <int kRowBytes, Lanes kLanes>
class LaneOffsets {
 public:
  TILEWISE_DEVICE explicit LaneOffsets(int lane, int first_step = 0) {
    const bool rows_first = kLanes == Lanes::rows_first;
    const int row = rows_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    const int chunk = rows_first ? lane >> 4 : (lane >> 3) & 1;
    for (int i = 0; i < kVariants; ++i)
      base_[i] = Swizzle<kRowBytes>::offset(row, 2 * (first_step + i) + chunk);
    // Hides from the compiler how base_[0] follows from `lane`; its value stays the same.
    base_[0] = ptx::shuffle(base_[0], lane);
  }

  TILEWISE_DEVICE uint32_t at(int row, int step) const {
    return base_[step % kVariants] +
           static_cast<uint32_t>(step / kVariants * kVariants * 32 + row * kRowBytes);
  }

  // The address in the tile at `tile`, a multiple of 128, when first_step is 0: it takes one
  // register per tile, and an xor with an immediate.
  TILEWISE_DEVICE uint32_t address(ptx::SharedAddress tile, int row, int step) const {
    return ((tile + base_[0]) ^ static_cast<uint32_t>(step % kVariants * 32)) +
           static_cast<uint32_t>(step / kVariants * kVariants * 32 + row * kRowBytes);
  }

 private:
  static constexpr int kVariants =
      Swizzle<kRowBytes>::kPeriod < 2 ? 1 : Swizzle<kRowBytes>::kPeriod / 2;
  uint32_t base_[kVariants];
};

// The addresses at which a lane reads 4-byte elements of 8 rows x 16 columns transposed, because
// ldmatrix.trans moves 16-bit elements only: rows 2t and 2t + 1, columns g and g + 8, with g = lane
// / 4 and t = lane % 4. Columns count from `first_step` on, which must be even if more than one
// step is read.
template <int kRowBytes>
class GatherOffsets {
 public:
  static_assert(kRowBytes % 128 == 0);

  TILEWISE_DEVICE explicit GatherOffsets(int lane, int first_step = 0)
      : base_(Swizzle<kRowBytes>::offset(lane % 4 * 2, 4 * first_step + lane / 16) +
              static_cast<uint32_t>(lane / 4 % 4 * 4)) {}

  TILEWISE_DEVICE GatherOffsets opaque() const {
    GatherOffsets o = *this;
    o.base_ = ptx::opaque(base_);
    return o;
  }

  // `row` is a multiple of 8; a step is 16 columns. which_column = 1 is two chunks further,
  // which_row = 1 one row further, which the swizzle puts into the adjacent chunk.
  TILEWISE_DEVICE uint32_t at(int row, int step, int which_column, int which_row) const {
    const int flip = step % 2 * 64 + which_column * 32 + which_row * 16;
    return (base_ ^ static_cast<uint32_t>(flip)) +
           static_cast<uint32_t>(step / 2 * 128 + (row + which_row) * kRowBytes);
  }

 private:
  uint32_t base_;
};

}  // namespace tilewise::cuda::tile
