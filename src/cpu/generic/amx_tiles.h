// The AMX instructions in use, wrapped in functions. tests/amx_emulator has a header of the same
// name and path that does the same in plain C++, for machines without AMX; a build selects it by
// placing that folder first among the include paths.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// The configuration must be a constant in memory: GCC's intrinsic claims to read only 8 bytes of
// it.
TILEWISE_FN void tile_configure(const TileConfig& config) { _tile_loadconfig(&config); }
TILEWISE_FN void tile_release() { _tile_release(); }

// GCC's intrinsics paste the number of a tile into assembly text, so it has to be a literal. Their
// tile loads do not tell the compiler that they read memory: see tile_fence.
template <int Tile>
TILEWISE_FN void tile_zero() {
  static_assert(0 <= Tile && Tile < 8);
  if constexpr (Tile == 0) _tile_zero(0);
  if constexpr (Tile == 1) _tile_zero(1);
  if constexpr (Tile == 2) _tile_zero(2);
  if constexpr (Tile == 3) _tile_zero(3);
  if constexpr (Tile == 4) _tile_zero(4);
  if constexpr (Tile == 5) _tile_zero(5);
  if constexpr (Tile == 6) _tile_zero(6);
  if constexpr (Tile == 7) _tile_zero(7);
}

// Strides in bytes.
template <int Tile>
TILEWISE_FN void tile_load(const void* from, int64_t stride) {
  static_assert(0 <= Tile && Tile < 8);
  if constexpr (Tile == 0) _tile_loadd(0, from, stride);
  if constexpr (Tile == 1) _tile_loadd(1, from, stride);
  if constexpr (Tile == 2) _tile_loadd(2, from, stride);
  if constexpr (Tile == 3) _tile_loadd(3, from, stride);
  if constexpr (Tile == 4) _tile_loadd(4, from, stride);
  if constexpr (Tile == 5) _tile_loadd(5, from, stride);
  if constexpr (Tile == 6) _tile_loadd(6, from, stride);
  if constexpr (Tile == 7) _tile_loadd(7, from, stride);
}

template <int Tile>
TILEWISE_FN void tile_store(void* to, int64_t stride) {
  static_assert(0 <= Tile && Tile < 8);
  if constexpr (Tile == 0) _tile_stored(0, to, stride);
  if constexpr (Tile == 1) _tile_stored(1, to, stride);
  if constexpr (Tile == 2) _tile_stored(2, to, stride);
  if constexpr (Tile == 3) _tile_stored(3, to, stride);
  if constexpr (Tile == 4) _tile_stored(4, to, stride);
  if constexpr (Tile == 5) _tile_stored(5, to, stride);
  if constexpr (Tile == 6) _tile_stored(6, to, stride);
  if constexpr (Tile == 7) _tile_stored(7, to, stride);
}

// C += A B in bf16 pairs. The supported register numbers are those of the two register blocks in
// amx_gemm.h (C in 0-3, A in 4-5, B in 6-7; or C in 4-5, A in 6-7, B in 0-3) and of decode_tiles.h.
template <int C, int A, int B>
TILEWISE_FN void tile_dot_bf16() {
  if constexpr (C == 0 && A == 4 && B == 6)
    _tile_dpbf16ps(0, 4, 6);
  else if constexpr (C == 1 && A == 4 && B == 7)
    _tile_dpbf16ps(1, 4, 7);
  else if constexpr (C == 2 && A == 5 && B == 6)
    _tile_dpbf16ps(2, 5, 6);
  else if constexpr (C == 3 && A == 5 && B == 7)
    _tile_dpbf16ps(3, 5, 7);
  else if constexpr (C == 4 && A == 6 && B == 0)
    _tile_dpbf16ps(4, 6, 0);
  else if constexpr (C == 5 && A == 6 && B == 1)
    _tile_dpbf16ps(5, 6, 1);
  else if constexpr (C == 4 && A == 7 && B == 2)
    _tile_dpbf16ps(4, 7, 2);
  else if constexpr (C == 5 && A == 7 && B == 3)
    _tile_dpbf16ps(5, 7, 3);
  else if constexpr (C == 0 && A == 1 && B == 2)
    _tile_dpbf16ps(0, 1, 2);
  else if constexpr (C == 4 && A == 3 && B == 6)
    _tile_dpbf16ps(4, 3, 6);
  else if constexpr (C == 5 && A == 3 && B == 7)
    _tile_dpbf16ps(5, 3, 7);
  else
    static_assert(C != C, "no register block does this");
}

// A compiler barrier between accesses to the operands or results and the tile instructions. It
// emits no instruction.
TILEWISE_FN void tile_fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // namespace
}  // namespace tilewise::cpu
