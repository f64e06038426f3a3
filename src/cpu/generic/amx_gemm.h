// The matrix engine of the AMX tile unit: blocks of 16 x 16 of C, 16 units of contraction per
// instruction.
#pragma once

#include "cpu/generic/amx_tiles.h"
#include "cpu/generic/gemm.h"

namespace tilewise::cpu {
namespace {

// A tile is 16 rows of 64 bytes: 16 fp32 of C, 16 units of a row of A, or 16 lanes of a unit of B.
inline constexpr int kTile = 16;

inline constexpr TileConfig kTileConfig = [] {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = kTile;
  }
  return config;
}();

// Configures the tiles of this thread for its lifetime and releases them at the end: tiles in use
// make every context switch save 8 KB and keep the core from its deeper sleep states.
struct TileSession {
  TILEWISE_FN TileSession() { tile_configure(kTileConfig); }
  TILEWISE_FN ~TileSession() { tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

template <int Tile>
TILEWISE_FN void load_units(const uint32_t* from, int64_t ld) {
  tile_load<Tile>(from, ld * 4);
}

template <int Tile>
TILEWISE_FN void begin_sum(const float* c, int64_t ldc, bool accumulate) {
  if (accumulate)
    tile_load<Tile>(c, ldc * 4);
  else
    tile_zero<Tile>();
}

// C of 32 rows and V vectors is in tiles 0-3, A in 4-5, B in 6-7. A chain of products on one
// accumulator runs at the full rate; four accumulators only serve to halve the loads: 4 loads of 8
// cycles each for 4 products of 16 cycles each.
template <int V>
struct TileBlock {
  template <int Row>
  TILEWISE_FN static void load_a(const OperandA& a, const uint32_t* from) {
    load_units<4 + Row>(from + Row * kTile * a.row, a.row);
  }
  TILEWISE_FN static void load_a(const OperandA& a, const uint32_t* from) {
    load_a<0>(a, from);
    load_a<1>(a, from);
  }
  TILEWISE_FN static void load_b(const OperandB& b, const uint32_t* from) {
    load_units<6>(from, b.ld);
    if constexpr (V == 2) load_units<7>(from + kTile, b.ld);
  }
  TILEWISE_FN static void multiply() {
    tile_dot_bf16<0, 4, 6>();
    if constexpr (V == 2) tile_dot_bf16<1, 4, 7>();
    tile_dot_bf16<2, 5, 6>();
    if constexpr (V == 2) tile_dot_bf16<3, 5, 7>();
  }

  template <int Parts>
  TILEWISE_FN static void run(float* c, int64_t ldc, bool accumulate, const OperandA& a,
                              const OperandB& b, int64_t units) {
    float* const below = c + kTile * ldc;
    begin_sum<0>(c, ldc, accumulate);
    begin_sum<2>(below, ldc, accumulate);
    if constexpr (V == 2) begin_sum<1>(c + kTile, ldc, accumulate);
    if constexpr (V == 2) begin_sum<3>(below + kTile, ldc, accumulate);
    const uint32_t* at_a = a.data;
    const uint32_t* at_b = b.data;
    for (int64_t u = 0; u < units; u += kTile, at_a += kTile, at_b += kTile * b.ld) {
      load_a(a, at_a);
      if constexpr (Parts == 2) {
        // high x low, high x high, low x high: 8 loads for 12 products. The omitted product low x
        // low is 2^-18 of the result, below the rounding of the sums.
        load_b(b, at_b + b.plane);
        multiply();
      }
      load_b(b, at_b);
      multiply();
      if constexpr (Parts == 2) {
        load_a(a, at_a + a.plane);
        multiply();
      }
    }
    tile_store<0>(c, ldc * 4);
    tile_store<2>(below, ldc * 4);
    if constexpr (V == 2) tile_store<1>(c + kTile, ldc * 4);
    if constexpr (V == 2) tile_store<3>(below + kTile, ldc * 4);
  }
};

// Two vectors of C whose contraction is one or two tiles long: all of B stays in tiles 0-3, C takes
// 4-5 and A 6-7. A row of C then costs half the loads of the block above (scores with D <= 64).
template <int Steps>
TILEWISE_FN void resident_columns(float* c, int64_t ldc, bool accumulate, const OperandA& a,
                                  int64_t m, const OperandB& b) {
  load_units<0>(b.data, b.ld);
  load_units<1>(b.data + kTile, b.ld);
  if constexpr (Steps == 2) {
    load_units<2>(b.data + kTile * b.ld, b.ld);
    load_units<3>(b.data + kTile * b.ld + kTile, b.ld);
  }
  for (int64_t i = 0; i < m; i += kTile) {
    float* const row = c + i * ldc;
    begin_sum<4>(row, ldc, accumulate);
    begin_sum<5>(row + kTile, ldc, accumulate);
    load_units<6>(a.data + i * a.row, a.row);
    tile_dot_bf16<4, 6, 0>();
    tile_dot_bf16<5, 6, 1>();
    if constexpr (Steps == 2) {
      load_units<7>(a.data + i * a.row + kTile, a.row);
      tile_dot_bf16<4, 7, 2>();
      tile_dot_bf16<5, 7, 3>();
    }
    tile_store<4>(row, ldc * 4);
    tile_store<5>(row + kTile, ldc * 4);
  }
}

template <int Parts, int V>
TILEWISE_FN void block_rows(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                            const OperandB& b, int64_t units) {
  for (int64_t i = 0; i < m; i += 2 * kTile) {
    TileBlock<V>::template run<Parts>(c + i * ldc, ldc, accumulate, a, b, units);
    a.data += 2 * kTile * a.row;
  }
}

// C[m][vectors * W] (+)= A B with A[row][unit] and B[unit][lane]; m is a multiple of 32 and units
// of 16. Rows of C are the inner loop, so that B, the smaller operand, stays in the L1 cache.
template <int Parts>
__attribute__((noinline)) void tile_gemm(float* c, int64_t ldc, bool accumulate, OperandA a,
                                         int64_t m, OperandB b, int64_t vectors, int64_t units) {
  static_assert(W == kTile);
  tile_fence();
  for (; vectors > 0; vectors -= 2, c += 2 * W, b.data += 2 * W) {
    if (vectors == 1)
      block_rows<Parts, 1>(c, ldc, accumulate, a, m, b, units);
    else if (Parts == 1 && units == kTile)
      resident_columns<1>(c, ldc, accumulate, a, m, b);
    else if (Parts == 1 && units == 2 * kTile)
      resident_columns<2>(c, ldc, accumulate, a, m, b);
    else
      block_rows<Parts, 2>(c, ldc, accumulate, a, m, b, units);
  }
  tile_fence();
}

}  // namespace
}  // namespace tilewise::cpu
