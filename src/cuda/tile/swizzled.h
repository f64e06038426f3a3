// Tiles in shared memory as TMA writes and wgmma reads them. Columns are cut into panels of 64 (128
// bytes), which lie one after the other; a panel is stored row by row with the 128-byte swizzle
// (16-byte chunk c of row r lies at chunk c ^ r % 8). A tile starts at a multiple of 1024 bytes,
// and its number of rows is a multiple of 8.
//
// PTX ISA 9.7.15.5.1 has the layouts, 9.7.15.5.1.2 the descriptor.
#pragma once

#include "base/math.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda::tile {

inline constexpr int kPanelColumns = 64;
inline constexpr int kSwizzledRowBytes = 128;

// head_dim rounded up to whole panels.
constexpr int panel_columns(int head_dim) {
  return static_cast<int>(round_up(head_dim, kPanelColumns));
}

// The matrix descriptor of a wgmma operand: address, leading and stride byte offset in units of 16
// bytes, and the 128-byte swizzle. Adding bytes >> 4 to a descriptor moves its start by `bytes`.
struct Operand {
  static constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

  static TILEWISE_FN constexpr uint64_t make(uint32_t address, int leading, int stride) {
    return static_cast<uint64_t>((address >> 4) & 0x3fff) |
           static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
           kSwizzle128;
  }
};

template <int kRows_, int kColumns_>
struct SwizzledTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanels = ceil_div(kColumns, kPanelColumns);
  static constexpr int kPanelBytes = kRows * kSwizzledRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kRows % 8 == 0);

  ptx::SharedAddress base;

  // Byte offset of the 16-byte chunk (8 columns) `chunk` of a row.
  static TILEWISE_FN constexpr int chunk_offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * kSwizzledRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
  }

  // The tile without its first `row` rows, a multiple of 8.
  TILEWISE_FN SwizzledTile from_row(int row) const {
    return {base + static_cast<uint32_t>(row) * kSwizzledRowBytes};
  }

  // The operand whose k index is the column (K-major), and whose m or n index is the row from row0
  // on, a multiple of 8. Product k takes columns 16 k to 16 k + 15, and its descriptor is
  // by_columns(row0) + column_step(k).
  TILEWISE_FN uint64_t by_columns(int row0 = 0) const {
    return Operand::make(from_row(row0).base, 16, 1024);
  }
  static TILEWISE_FN constexpr uint64_t column_step(int k) {
    return static_cast<uint64_t>((k / 4 * kPanelBytes + k % 4 * 32) >> 4);
  }

  // The operand whose k index is the row (transposed: kTransA or kTransB), and whose m or n index
  // is the column from panel `panel` on. Product k takes rows 16 k to 16 k + 15: its descriptor is
  // by_rows(panel) + row_step(k).
  TILEWISE_FN uint64_t by_rows(int panel = 0) const {
    return Operand::make(base + static_cast<uint32_t>(panel) * kPanelBytes, kPanelBytes, 1024);
  }
  static TILEWISE_FN constexpr uint64_t row_step(int k) {
    return static_cast<uint64_t>(k * 16 * kSwizzledRowBytes >> 4);
  }
};

}  // namespace tilewise::cuda::tile
