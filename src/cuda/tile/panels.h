// The addresses at which a lane reads a SwizzledTile of 16-bit elements, written by TMA, with
// ldmatrix: the counterparts of classes of shared_tile.h, copy.h and fragment.h. A panel has the
// swizzle of a tile of shared_tile.h with rows of 128 bytes.
#pragma once

#include "cuda/tile/copy.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::tile {

// LaneOffsets for such a tile.
template <class Tile, Lanes kLanes>
class PanelOffsets {
 public:
  TILEWISE_DEVICE explicit PanelOffsets(int lane) : panel_(lane) {}

  TILEWISE_DEVICE uint32_t address(ptx::SharedAddress tile, int row, int step) const {
    return panel_.address(tile, row, step % kSteps) +
           static_cast<uint32_t>(step / kSteps * Tile::kPanelBytes);
  }

 private:
  static constexpr int kSteps = kSwizzledRowBytes / 32;
  LaneOffsets<kSwizzledRowBytes, kLanes> panel_;
};

// CopyLanes of a warp for such a tile.
template <class Tile, int kRowBytes>
struct PanelLanes : CopyLanes<ptx::kWarpSize, Tile::kRows, kRowBytes> {
  using Lanes = CopyLanes<ptx::kWarpSize, Tile::kRows, kRowBytes>;

  TILEWISE_DEVICE explicit PanelLanes(int lane) : Lanes(lane) {
    Lanes::first = static_cast<uint32_t>(Tile::chunk_offset(Lanes::row, Lanes::chunk));
  }

  TILEWISE_DEVICE uint32_t offset(int pass, int column) const {
    const int rows = Lanes::rows_to(pass);
    const int chunks = column * Lanes::kStride;
    const int permuted = (rows ^ chunks) & 7;
    return (Lanes::first ^ static_cast<uint32_t>(permuted * 16)) +
           static_cast<uint32_t>(rows * kSwizzledRowBytes + chunks / 8 * Tile::kPanelBytes);
  }
};

// TransposedB for such a tile.
template <class Element, class Tile>
class PanelB {
 public:
  static_assert(Element::kBytes == 2);

  TILEWISE_DEVICE explicit PanelB(int lane) : offsets_(lane) {}

  TILEWISE_DEVICE Fragment<Element> load_whole(ptx::SharedAddress tile, int row, int step) const {
    Fragment<Element> f;
    ptx::ldmatrix_x4_trans(f.r, offsets_.address(tile, row, step));
    return f;
  }

 private:
  PanelOffsets<Tile, Lanes::rows_first> offsets_;
};

}  // namespace tilewise::cuda::tile
