// What a matrix engine looks like from outside: data read by the planner and by the kernels.
#pragma once

#include "attention/problem.h"
#include "cpu/backend.h"

namespace tilewise::cpu {

// A product is C[m][n] (+)= sum over u of A(m, u) B[u][n]. A unit is 32 bits: one fp32, or two
// neighbouring bf16 along the contraction. n runs over vector lanes. Sizes below are in lanes, rows
// and units; operands are padded to them with zeros, so the loops have no tails.
struct Shape {
  const char* engine;
  int lanes;   // W: fp32 lanes of a vector register
  int panel;   // lanes of one register block: columns of C
  int rows;    // rows of C in one register block
  int pair;    // elements in a unit
  int units;   // the contraction is a multiple of this many units
  int parts;   // 2: every operand is a sum of two bf16 (fp16 on bf16 matrix units)
  int tile_q;  // packed query rows of a forward work item
  int back_q;  // and of a backward step
};

// For experiments on the machine in question: -DTILEWISE_AMX_TILE_Q=512 and so on, for every
// source.
#if !defined(TILEWISE_AMX_PANEL)
#define TILEWISE_AMX_PANEL 32
#endif
#if !defined(TILEWISE_AMX_TILE_Q)
#define TILEWISE_AMX_TILE_Q 256
#endif
#if !defined(TILEWISE_AMX_BACK_Q)
#define TILEWISE_AMX_BACK_Q 128
#endif
#if !defined(TILEWISE_TILE_K)
#define TILEWISE_TILE_K 128
#endif
#if !defined(TILEWISE_BACK_TILE_K)
#define TILEWISE_BACK_TILE_K 64
#endif
#if !defined(TILEWISE_BACK_CHUNK)
#define TILEWISE_BACK_CHUNK 256
#endif

constexpr Shape amx_shape(const char* engine, int parts) {
  return {
      engine, 16, TILEWISE_AMX_PANEL, 32, 2, 16, parts, TILEWISE_AMX_TILE_Q, TILEWISE_AMX_BACK_Q};
}

constexpr Shape shape_of(Isa isa, int32_t dtype) {
  switch (isa) {
    case Isa::portable:
      return {"fma", 4, 8, 4, 1, 1, 1, 64, 32};
    case Isa::avx2:
      return {"fma", 8, 24, 4, 1, 1, 1, 120, 72};
    case Isa::amx:
      if (dtype == TILEWISE_BFLOAT16) return amx_shape("amx", 1);
      if (dtype == TILEWISE_FLOAT16) return amx_shape("amx_split", 2);
      return {"fma", 16, 48, 8, 1, 1, 1, 192, 96};
    case Isa::avx512_bf16:
      if (dtype == TILEWISE_BFLOAT16) return {"dot", 16, 48, 8, 2, 1, 1, 192, 96};
      return {"fma", 16, 48, 8, 1, 1, 1, 192, 96};
    case Isa::avx512:
      return {"fma", 16, 48, 8, 1, 1, 1, 192, 96};
  }
  return {};
}

// Decoding: at most this many packed rows stream through K and V, which then are read once and not
// packed (StreamedProducts); more rows go to a matrix engine.
constexpr int thin_rows(Isa isa) { return min(8, shape_of(isa, TILEWISE_FLOAT32).lanes); }

constexpr Shape thin_shape_of(Isa isa, int32_t) {
  const int lanes = shape_of(isa, TILEWISE_FLOAT32).lanes;
  // Units: rows of q are whole reads, which are two registers of bf16.
  return {"stream", lanes, lanes, lanes, 1, 2 * lanes, 1, thin_rows(isa), 0};
}

// Keys of a tile. 128 keys of S for one panel stay in the L1 cache (24 KB at 48 lanes).
inline constexpr int64_t kTileK = TILEWISE_TILE_K;
inline constexpr int64_t kBackTileK = TILEWISE_BACK_TILE_K;

// Keys of a backward work item: its packed keys and values and their gradients stay in the L2
// cache.
constexpr int64_t back_chunk(int64_t head_dim, int64_t head_dim_v) {
  return head_dim + head_dim_v <= 128 ? TILEWISE_BACK_CHUNK : TILEWISE_BACK_CHUNK / 2;
}

// Sizes of packed operands.
struct Extent {
  int64_t units;  // contraction along columns, padded
  int64_t ld;     // units of a row as stored: whole vectors
  int64_t m;      // columns as rows of C, padded
  int64_t m_ld;   // columns as stored: whole vectors and whole register blocks
  int64_t n_ld;   // columns as lanes of C: whole vectors
};

constexpr Extent extent_of(const Shape& s, int64_t columns) {
  const int64_t units = round_up(ceil_div(columns, s.pair), s.units);
  const int64_t m = round_up(columns, s.rows);
  return {units, round_up(units, s.lanes), m, round_up(m, s.lanes),
          round_up(columns, s.units > 1 ? 2 * s.lanes : s.lanes)};
}

}  // namespace tilewise::cpu
