// The properties of a matrix engine that the planner and the kernels need.
#pragma once

#include "attention/problem.h"
#include "cpu/backend.h"

namespace tilewise::cpu {

// A product is C[m][n] (+)= sum over u of A(m, u) B[u][n]. A unit is 32 bits: one fp32, or two
// neighbouring bf16 along the contraction. n runs over vector lanes. Sizes below are in lanes, rows
// and units; operands are padded to them with zeros, so the loops have no tails.
struct Shape {
  const char* engine;
  int lanes;         // W: fp32 lanes of a vector register
  int panel;         // lanes of a register block: columns of C
  int rows;          // rows of C in a register block
  int pair;          // elements per unit
  int units;         // the contraction is a multiple of this many units
  int parts;         // 2: every operand is a sum of two bf16 (fp16 on bf16 matrix units)
  int tile_q;        // packed query rows of a forward work item
  int large_tile_q;  // the same if there are enough items for all threads
  int tile_k;        // keys of a forward tile
  int strip;         // keys of a tile whose scores are in memory at a time
  int back_q;        // packed query rows of a backward step
  int back_keys;     // keys of a backward work item, at head dimension 64
};

// The tile unit, for bf16 and fp16.
constexpr Shape amx_shape_of(int32_t dtype) {
  if (dtype == TILEWISE_BFLOAT16)
    return {.engine = "amx",
            .lanes = 16,
            .panel = 32,
            .rows = 32,
            .pair = 2,
            .units = 16,
            .parts = 1,
            .tile_q = 256,
            .large_tile_q = 512,
            .tile_k = 256,
            .strip = 64,
            .back_q = 128,
            .back_keys = 1024};
  return {.engine = "amx_split",
          .lanes = 16,
          .panel = 32,
          .rows = 32,
          .pair = 2,
          .units = 16,
          .parts = 2,
          .tile_q = 256,
          .large_tile_q = 512,
          .tile_k = 128,
          .strip = 64,
          .back_q = 128,
          .back_keys = 1024};
}

// A register block of 8 rows and 12 lanes takes 24 of the 32 registers. S^T of one panel and
// one tile is 6 KB, and no benchmark has chosen the other sizes.
constexpr Shape neon_shape(int pair) {
  return {.engine = pair == 2 ? "dot" : "fma",
          .lanes = 4,
          .panel = 12,
          .rows = 8,
          .pair = pair,
          .units = 1,
          .parts = 1,
          .tile_q = 96,
          .large_tile_q = 96,
          .tile_k = 128,
          .strip = 128,
          .back_q = 48,
          .back_keys = 256};
}

// With the vector engines, S^T of one panel and one tile stays in the L1 cache (128 keys of 48
// lanes: 24 KB). With AMX longer tiles are faster, because sums of O stay in tile registers for
// longer, but only a strip of scores (8 KB) is in memory at a time. Computing the scores of the
// next strip beside the weights of this one gains nothing: while the tile unit multiplies, one of
// the two multipliers of the vector unit is idle.
constexpr Shape shape_of(Isa isa, int32_t dtype) {
  constexpr Shape avx512 = {.engine = "fma",
                            .lanes = 16,
                            .panel = 48,
                            .rows = 8,
                            .pair = 1,
                            .units = 1,
                            .parts = 1,
                            .tile_q = 192,
                            .large_tile_q = 192,
                            .tile_k = 128,
                            .strip = 128,
                            .back_q = 96,
                            .back_keys = 512};
  switch (isa) {
    case Isa::portable:
      return {.engine = "fma",
              .lanes = 4,
              .panel = 8,
              .rows = 4,
              .pair = 1,
              .units = 1,
              .parts = 1,
              .tile_q = 64,
              .large_tile_q = 64,
              .tile_k = 128,
              .strip = 128,
              .back_q = 32,
              .back_keys = 256};
    case Isa::neon:
      return neon_shape(1);
    case Isa::neon_bf16:
      return neon_shape(dtype == TILEWISE_BFLOAT16 ? 2 : 1);
    case Isa::avx2:
      return {.engine = "fma",
              .lanes = 8,
              .panel = 24,
              .rows = 4,
              .pair = 1,
              .units = 1,
              .parts = 1,
              .tile_q = 120,
              .large_tile_q = 120,
              .tile_k = 128,
              .strip = 128,
              .back_q = 72,
              .back_keys = 256};
    case Isa::avx512:
      return avx512;
    case Isa::avx512_bf16:
      if (dtype == TILEWISE_BFLOAT16)
        return {.engine = "dot",
                .lanes = 16,
                .panel = 48,
                .rows = 8,
                .pair = 2,
                .units = 1,
                .parts = 1,
                .tile_q = 192,
                .large_tile_q = 192,
                .tile_k = 128,
                .strip = 128,
                .back_q = 96,
                .back_keys = 512};
      return avx512;
    case Isa::amx:
      if (dtype == TILEWISE_BFLOAT16 || dtype == TILEWISE_FLOAT16) return amx_shape_of(dtype);
      return avx512;
  }
  return {};
}

// Decoding: up to this many packed rows of a key/value head stream through K and V, which are read
// once and not packed (generic/decode.h); more rows use a matrix engine. For the AMX tile unit
// sixteen rows cost as much as one.
constexpr int max_decode_rows(Isa isa, int32_t dtype) {
  if (isa == Isa::amx && dtype == TILEWISE_BFLOAT16) return 32;
  return min(8, shape_of(isa, TILEWISE_FLOAT32).lanes);
}

// Largest number of rows of a work item over all its heads, such as eight heads of sixteen rows.
// Heads that lie side by side in memory are read together, because reading half of them now and the
// other half later gives 9 instead of 11 GB/s (bf16, D = 128).
inline constexpr int kDecodeRows = 128;

TILEWISE_FN bool heads_side_by_side(const Problem& p) {
  return 0 < p.k.stride_head && p.k.stride_head < p.k.stride_row && 0 < p.v.stride_head &&
         p.v.stride_head < p.v.stride_row;
}

constexpr Shape decode_shape_of(Isa isa, int32_t dtype) {
  const int lanes = shape_of(isa, TILEWISE_FLOAT32).lanes;
  const int rows = max_decode_rows(isa, dtype);
  return {.engine = "stream",
          .lanes = lanes,
          .panel = max(rows, lanes),
          .rows = lanes,
          .pair = 1,
          .units = 1,
          .parts = 1,
          .tile_q = rows,
          .large_tile_q = rows,
          .tile_k = 128,
          .strip = 128,
          .back_q = 0,
          .back_keys = 0};
}

// Keys of a backward tile.
inline constexpr int64_t kBackTileK = 64;

// Keys of a backward work item: as many as keep the packed keys, values and their gradients in the
// L2 cache, because every item packs all its queries; fewer if there would be too few items.
TILEWISE_FN int64_t back_chunk(const Shape& s, const Problem& p) {
  constexpr int64_t kWantedItems = 16;
  const int64_t keys = key_capacity(p);
  const int64_t heads = p.heads_kv * (p.cu_seqlens_k == nullptr ? p.batch : 1);
  int64_t chunk = p.head_dim + p.head_dim_v <= 128 ? s.back_keys : s.back_keys / 2;
  if (p.batch_invariant != 0) return chunk;  // dq must be summed over the same chunks in any batch
  while (chunk > 2 * kBackTileK && heads * ceil_div(keys, chunk) < kWantedItems) chunk /= 2;
  return chunk;
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
  return {.units = units,
          .ld = round_up(units, s.lanes),
          .m = m,
          .m_ld = round_up(m, s.lanes),
          .n_ld = round_up(columns, s.units > 1 ? 2 * s.lanes : s.lanes)};
}

}  // namespace tilewise::cpu
