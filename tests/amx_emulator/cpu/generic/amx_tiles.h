// The AMX instructions of src/cpu/generic/amx_tiles.h in plain C++, with the same path and names; a
// build selects them by placing this folder first among the include paths. Where the instruction
// would fault, the process ends.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

namespace emulator {

struct Tiles {
  bool configured = false;
  int rows[8] = {};
  int row_bytes[8] = {};
  float data[8][16][16] = {};
};

inline thread_local Tiles tiles;

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "AMX emulator: %s\n", what);
  std::abort();
}

inline void need(bool condition, const char* otherwise) {
  if (!condition) fault(otherwise);
}

// Denormals are zero, in and out, whatever the floating-point state of the thread.
inline float flush(float x) { return std::fabs(x) < FLT_MIN ? x * 0.0f : x; }

inline float bf16_of(float unit, int element) {
  const uint32_t bits = tilewise::detail::bits_of(unit);
  return flush(tilewise::detail::float_of(element == 0 ? bits << 16 : bits & 0xffff0000u));
}

inline void configure(const TileConfig& config) {
  bool reserved = config.start_row != 0;
  for (const uint8_t byte : config.reserved) reserved |= byte != 0;
  for (int i = 8; i < 16; ++i) reserved |= config.rows[i] != 0 || config.row_bytes[i] != 0;
  need(config.palette == 1, "palette is not 1");
  need(!reserved, "a reserved byte of the tile configuration is not 0");
  tiles = Tiles{};
  tiles.configured = true;
  for (int i = 0; i < 8; ++i) {
    need(config.rows[i] <= 16 && config.row_bytes[i] <= 64,
         "a tile larger than 16 rows of 64 bytes");
    need((config.rows[i] == 0) == (config.row_bytes[i] == 0),
         "a tile with rows but no columns, or columns but no rows");
    tiles.rows[i] = config.rows[i];
    tiles.row_bytes[i] = config.row_bytes[i];
  }
}

inline void use(int tile) {
  need(tiles.configured, "tiles used without a configuration");
  need(tiles.rows[tile] > 0, "a tile used that is not configured");
}

inline void zero(int tile) {
  use(tile);
  for (auto& row : tiles.data[tile])
    for (float& x : row) x = 0.0f;
}

inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    __builtin_memcpy(tiles.data[tile][row], static_cast<const char*>(from) + row * stride,
                     static_cast<size_t>(tiles.row_bytes[tile]));
}

inline void store(int tile, void* to, int64_t stride) {
  use(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles.data[tile][row],
                     static_cast<size_t>(tiles.row_bytes[tile]));
}

// TDPBF16PS: products of even and of odd elements are summed separately, from zero, by fused
// operations in the order of the contraction; then the two sums are added, and their sum is added
// to C.
inline void dot_bf16(int c, int a, int b) {
  use(c);
  use(a);
  use(b);
  need(c != a && c != b && a != b, "operands of a product share a tile");
  need(tiles.rows[c] == tiles.rows[a] && tiles.row_bytes[c] == tiles.row_bytes[b] &&
           tiles.row_bytes[a] == 4 * tiles.rows[b],
       "shapes of a product do not fit");
  const int units = tiles.rows[b];
  const int lanes = tiles.row_bytes[c] / 4;
  float columns[16][2][16] = {};
  for (int unit = 0; unit < units; ++unit)
    for (int element = 0; element < 2; ++element)
      for (int lane = 0; lane < lanes; ++lane)
        columns[unit][element][lane] = bf16_of(tiles.data[b][unit][lane], element);
  for (int row = 0; row < tiles.rows[c]; ++row) {
    float sums[2][16] = {};
    for (int unit = 0; unit < units; ++unit)
      for (int element = 0; element < 2; ++element) {
        const float value = bf16_of(tiles.data[a][row][unit], element);
        for (int lane = 0; lane < 16; ++lane)
          sums[element][lane] =
              flush(std::fma(value, columns[unit][element][lane], sums[element][lane]));
      }
    for (int lane = 0; lane < lanes; ++lane) {
      float& sum = tiles.data[c][row][lane];
      sum = flush(flush(sum) + flush(sums[0][lane] + sums[1][lane]));
    }
  }
}

}  // namespace emulator

inline void tile_configure(const TileConfig& config) { emulator::configure(config); }
inline void tile_release() { emulator::tiles.configured = false; }

template <int Tile>
void tile_zero() {
  static_assert(0 <= Tile && Tile < 8);
  emulator::zero(Tile);
}
template <int Tile>
void tile_load(const void* from, int64_t stride) {
  static_assert(0 <= Tile && Tile < 8);
  emulator::load(Tile, from, stride);
}
template <int Tile>
void tile_store(void* to, int64_t stride) {
  static_assert(0 <= Tile && Tile < 8);
  emulator::store(Tile, to, stride);
}
template <int C, int A, int B>
void tile_dot_bf16() {
  emulator::dot_bf16(C, A, B);
}
inline void tile_fence() {}

}  // namespace
}  // namespace tilewise::cpu
