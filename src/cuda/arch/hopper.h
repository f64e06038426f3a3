// The tile table of the wgmma family. Measured on an H200 (docs/lab/hopper-kernels.md).
#pragma once

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

// Tile sizes of a kernel: `small` is for sequences of few rows, where a smaller tile computes less
// beyond the edge of a causal band.
enum class TileSize { large, small };

// Architecture-specific code (sm_90a): it runs on this very capability and on no later one. The
// number of such a table is ten times the capability, plus one.
struct Sm90a {
  static constexpr int kTable = 901;

  static constexpr WgmmaForwardTile forward(int head_dim, int head_dim_v, TileSize size) {
    const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    if (widest <= 64) {
      // Four warpgroups and short key tiles: 1.05x at 512 and 1k rows.
      if (size == TileSize::small) return {4, 64, 4, 2, false, false, 112, 32, false};
      // Two warpgroups and 192 keys: 0.87 to 1.0 of it.
      return {3, 128, 2, 2, true, false, 160, 32, false};
    }
    if (size == TileSize::small) return {};
    // Loops for single options have registers enough here (D128: softcap 58 -> 76 % of the plain
    // form's speed), elsewhere they spill, and each takes 10 s to compile.
    // 144, 160 and 176 keys: 0.80 to 1.03 of it.
    // Where steps take no maximum, turns are worth up to 6 % (causal; with dropout 5 to 16 %), else
    // (more than one option) they cost 2 %.
    if (widest <= 128) return {2, 128, 2, 2, true, true, 232, 40, true};
    if (widest <= 192 && head_dim_v <= 128) return {2, 128, 2, 1, false, false, 232, 40, false};
    if (widest <= 192) return {2, 96, 2, 1, false, false, 232, 40, false};
    // Two stages of no more than 80 keys fit beside Q (224 of 227 KB).
    return {2, 80, 2, 1, false, false, 232, 40, false};
  }
  // Which problems take the small tile: at 2k rows it is 2 % faster with a causal edge, and 7 %
  // slower without one.
  static constexpr bool prefers_small_forward(int64_t rows, bool has_edges) {
    return rows <= (has_edges ? 2048 : 1024);
  }

  static constexpr WgmmaBackwardTile backward(int head_dim, TileSize size) {
    const bool small = size == TileSize::small;
    // Latency-bound: many queries, statistics where they are used.
    if (head_dim <= 64)
      return small ? WgmmaBackwardTile{}
                   : WgmmaBackwardTile{128, 128, 1, false, SendDq::under_scores, 240, 24, true};
    // 80 queries are faster once there is much to walk, 64 lose less at a causal edge.
    if (head_dim <= 128)
      return small ? WgmmaBackwardTile{128, 64, 1, true, SendDq::under_dp, 240, 24, true}
                   : WgmmaBackwardTile{128, 80, 1, true, SendDq::under_scores, 240, 24, false};
    if (head_dim <= 192)
      return small ? WgmmaBackwardTile{}
                   : WgmmaBackwardTile{96, 64, 1, false, SendDq::at_once, 240, 24, false};
    // The sums of dQ are the wall: two blocks halve them (448 to 517 TFLOP/s at 16k rows).
    return {80, 64, small ? 1 : 2, false, SendDq::at_once, 240, 24, false};
  }
  // Which problems take the small tile. By columns a cluster pays from 2k rows on; the general form
  // has registers for 64 queries, not for 80.
  static constexpr bool prefers_small_backward(int head_dim, int64_t rows, bool has_edges,
                                               bool general) {
    return head_dim > 192 ? rows < 2048 : general || (has_edges && rows <= 4096);
  }
};

}  // namespace tilewise::cuda::arch
