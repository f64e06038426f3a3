// Tiles of fp32 numbers stored as pairs of tf32 numbers: the threads that copied a tile split it
// once (`split`), instead of every warp that multiplies it.
#pragma once

#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tile {

// For an operand B that is stored [n][k] as two tiles: the high parts and, `low` bytes after them,
// the low parts.
TILEWISE_DEVICE Fragment<F32> load_split(ptx::SharedAddress address, uint32_t low) {
  Fragment<F32> f;
  ptx::ldmatrix_x4(f.r, address);
  ptx::ldmatrix_x4(f.low, address + low);
  return f;
}

TILEWISE_DEVICE void store_split(ptx::SharedAddress address, uint32_t low, const uint32_t (&x)[4]) {
  Fragment<F32> f = {{x[0], x[1], x[2], x[3]}, {}};
  split(f);
  ptx::st_shared_v4_b32(address, f.r);
  ptx::st_shared_v4_b32(address + low, f.low);
}

// An operand B that is stored [k][n]: 16 bytes (high, high, low, low) for every column of a pair of
// rows, which is what a lane needs of 8 rows x 8 columns. A pair of rows has kColumns such units.
template <int kColumns>
class PairTile {
 public:
  static_assert(kColumns % 32 == 0);
  static constexpr int kPairBytes = kColumns * 16;

  // With g = lane / 4 and t = lane % 4, a lane reads column g of pair t. The eight lanes that
  // access memory together, two g and all t, must not share banks, nor must eight lanes that store
  // adjacent chunks of four columns: `unit` permutes the columns for both.
  TILEWISE_DEVICE explicit PairTile(int lane)
      : base_(static_cast<uint32_t>(lane % 4 * kPairBytes) + unit(lane % 4, lane / 4)) {}

  // Loads kStep rows from `row` on, a multiple of 8, and 16 columns from 16 * `step` on. The tile
  // starts at address `tile`, a multiple of 128.
  TILEWISE_DEVICE Fragment<F32> load_whole(ptx::SharedAddress tile, int row, int step) const {
    Fragment<F32> f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[4];
      const int block = 2 * step + half;
      ptx::ld_shared_v4_b32(x, ((tile + base_) ^ static_cast<uint32_t>(block % 4 * 16)) +
                                   static_cast<uint32_t>(block * 128 + row / 2 * kPairBytes));
      f.r[2 * half] = x[0];
      f.r[2 * half + 1] = x[1];
      f.low[2 * half] = x[2];
      f.low[2 * half + 1] = x[3];
    }
    return f;
  }

  // Stores chunk `chunk` (four columns) of both rows of pair `pair`.
  TILEWISE_DEVICE static void store(ptx::SharedAddress tile, int pair, int chunk,
                                    const uint32_t (&even)[4], const uint32_t (&odd)[4]) {
    const ptx::SharedAddress at =
        tile + static_cast<uint32_t>(pair * kPairBytes) + unit(pair, chunk * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Fragment<F32> f = {{even[i], odd[i]}, {}};
      split(f);
      ptx::st_shared_v4_b32(at ^ static_cast<uint32_t>(i * 16),
                            {f.r[0], f.r[1], f.low[0], f.low[1]});
    }
  }

 private:
  TILEWISE_DEVICE static uint32_t unit(int pair, int column) {
    return static_cast<uint32_t>((column ^ (pair % 4 * 2) ^ (column / 8 % 4)) * 16);
  }
  uint32_t base_;
};

}  // namespace tilewise::cuda::tile
