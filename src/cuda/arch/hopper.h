// Tile table of the wgmma family, measured on an H200 (docs/lab/hopper-kernels.md).
#pragma once

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

// Tile sizes of a kernel. `small` is for sequences of few rows, where a smaller tile computes less
// beyond the edge of a causal band, and in the forward for masks of blocks.
enum class TileSize { large, small };

// Architecture-specific code (sm_90a) runs on exactly this compute capability and on no later one.
// The number of its table is ten times the compute capability (90), plus one.
struct Sm90a {
  static constexpr int kTable = 901;

  static constexpr WgmmaForwardTile forward(int head_dim, int head_dim_v, TileSize size) {
    const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    if (widest <= 64) {
      // Four warpgroups and short key tiles are 1.05x as fast as the large tile at 512 and 1k rows.
      if (size == TileSize::small)
        return {.consumer_warpgroups = 4,
                .keys = 64,
                .stages = 4,
                .q_buffers = 2,
                .ping_pong = false,
                .overlap_tiles = false,
                .consumer_registers = 112,
                .producer_registers = 32,
                .option_loops = false};
      // Two warpgroups and 192 keys reach 0.87 to 1.0 of this tile's speed.
      return {.consumer_warpgroups = 3,
              .keys = 128,
              .stages = 2,
              .q_buffers = 2,
              .ping_pong = true,
              .overlap_tiles = false,
              .consumer_registers = 160,
              .producer_registers = 32,
              .option_loops = false};
    }
    if (size == TileSize::small) return {};
    // 144, 160 and 176 keys reach 0.80 to 1.03 of this tile's speed. Loops for single options have
    // enough registers here (D128: softcap 58 -> 76 % of the fast path's speed); in other tiles
    // they spill, and each takes 10 s to compile. Ping-pong gains up to 6 % (causal; 5 to 16 % with
    // dropout) in loops whose steps do not compute the maximum of their scores, and loses 2 % in
    // the loop for more than one option, whose steps do.
    if (widest <= 128)
      return {.consumer_warpgroups = 2,
              .keys = 128,
              .stages = 2,
              .q_buffers = 2,
              .ping_pong = true,
              .overlap_tiles = true,
              .consumer_registers = 232,
              .producer_registers = 40,
              .option_loops = true};
    if (widest <= 192 && head_dim_v <= 128)
      return {.consumer_warpgroups = 2,
              .keys = 128,
              .stages = 2,
              .q_buffers = 1,
              .ping_pong = false,
              .overlap_tiles = false,
              .consumer_registers = 232,
              .producer_registers = 40,
              .option_loops = false};
    if (widest <= 192)
      return {.consumer_warpgroups = 2,
              .keys = 96,
              .stages = 2,
              .q_buffers = 1,
              .ping_pong = false,
              .overlap_tiles = false,
              .consumer_registers = 232,
              .producer_registers = 40,
              .option_loops = false};
    // Two stages of at most 80 keys fit beside Q (224 of 227 KB).
    return {.consumer_warpgroups = 2,
            .keys = 80,
            .stages = 2,
            .q_buffers = 1,
            .ping_pong = false,
            .overlap_tiles = false,
            .consumer_registers = 232,
            .producer_registers = 40,
            .option_loops = false};
  }
  // The tile for float8. It has one size, to keep the library small.
  static constexpr WgmmaForwardTile float8_forward(int head_dim, int head_dim_v, TileSize size) {
    if (size == TileSize::small || head_dim_v > 128) return {};
    return {.consumer_warpgroups = 2,
            .keys = 128,
            .stages = head_dim <= 128 ? 4 : 2,
            .q_buffers = 2,
            .ping_pong = true,
            .overlap_tiles = false,
            .consumer_registers = 232,
            .producer_registers = 40,
            .option_loops = false};
  }
  // The largest head dimension with a masked form.
  static constexpr int kMaxMaskedHeadDim = 128;

  // The tile of the masked form. The warps that read the mask need more registers than those that
  // load, so consumers give them eight of each thread's. The large tile of D64 has none to give:
  // with 152 instead of 160, ptxas serialises the products.
  static constexpr WgmmaForwardTile masked_forward(int head_dim, int head_dim_v, TileSize size) {
    const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    if (widest > kMaxMaskedHeadDim) return {};
    // A block of a mask of blocks. The large tile cuts every second block: where 10 % of all blocks
    // are visible, it computes 1.9 times the visible pairs, in tiles of which 93 % are partial.
    // Four stages hold keys of the next work tile when few key tiles of this one are visible.
    if (widest <= 64 && size == TileSize::small)
      return {.consumer_warpgroups = 2,
              .keys = 128,
              .stages = 4,
              .q_buffers = 2,
              .ping_pong = true,
              .overlap_tiles = true,
              .consumer_registers = 224,
              .producer_registers = 56,
              .option_loops = false};
    WgmmaForwardTile tile = forward(head_dim, head_dim_v, size);
    if (tile.consumer_warpgroups == 2) {
      tile.consumer_registers -= 8;
      tile.producer_registers += 16;
    }
    return tile;
  }

  // Whether a problem uses the small tile: at 2k rows it is 2 % faster with a causal edge, and 7 %
  // slower without one.
  static constexpr bool prefers_small_forward(int64_t rows, bool has_edges) {
    return rows <= (has_edges ? 2048 : 1024);
  }
  // The same with a mask. Ranges at many rows keep the large tile, with which causal ones run at
  // 0.92 to 0.95 of the speed without a mask: two warpgroups may be slower than three.
  static constexpr bool prefers_small_masked_forward(int64_t rows, bool has_blocks) {
    return has_blocks || rows <= 2048;
  }

  static constexpr WgmmaBackwardTile backward(int head_dim, TileSize size) {
    const bool small = size == TileSize::small;
    // These head dims are latency-bound, so a step has many queries, and row statistics are read
    // where they are used (no preload).
    if (head_dim <= 64)
      return small ? WgmmaBackwardTile{}
                   : WgmmaBackwardTile{.keys = 128,
                                       .queries = 128,
                                       .cluster_size = 1,
                                       .preload = false,
                                       .send = SendDq::under_scores,
                                       .consumer_registers = 240,
                                       .producer_registers = 24,
                                       .option_loops = true};
    // 80 queries per step are faster when a CTA has many steps; 64 waste less at a causal edge.
    if (head_dim <= 128)
      return small ? WgmmaBackwardTile{.keys = 128,
                                       .queries = 64,
                                       .cluster_size = 1,
                                       .preload = true,
                                       .send = SendDq::under_dp,
                                       .consumer_registers = 240,
                                       .producer_registers = 24,
                                       .option_loops = true}
                   : WgmmaBackwardTile{.keys = 128,
                                       .queries = 80,
                                       .cluster_size = 1,
                                       .preload = true,
                                       .send = SendDq::under_scores,
                                       .consumer_registers = 240,
                                       .producer_registers = 24,
                                       .option_loops = false,
                                       .spare_registers = false};
    if (head_dim <= 192)
      return small ? WgmmaBackwardTile{}
                   : WgmmaBackwardTile{.keys = 96,
                                       .queries = 64,
                                       .cluster_size = 1,
                                       .preload = false,
                                       .send = SendDq::at_once,
                                       .consumer_registers = 240,
                                       .producer_registers = 24,
                                       .option_loops = false};
    // The reductions of dQ limit the speed. A cluster of two CTAs halves them (448 to 517 TFLOP/s
    // at 16k rows).
    return {.keys = 80,
            .queries = 64,
            .cluster_size = small ? 1 : 2,
            .preload = false,
            .send = SendDq::at_once,
            .consumer_registers = 240,
            .producer_registers = 24,
            .option_loops = false};
  }
  // The same tile for the general form, which has registers for 64 queries, not for 80.
  static constexpr WgmmaBackwardTile general_backward(int head_dim, TileSize size) {
    const WgmmaBackwardTile tile = backward(head_dim, size);
    return tile.spare_registers ? tile : WgmmaBackwardTile{};
  }
  // The same for the masked form. The warp that reads the mask needs more registers than those that
  // load and reduce: consumers can give 16 of each thread's, or 8 at D64, without spills in their
  // loop.
  static constexpr WgmmaBackwardTile masked_backward(int head_dim, TileSize size) {
    WgmmaBackwardTile tile = general_backward(head_dim, size);
    if (head_dim > kMaxMaskedHeadDim || tile.keys == 0) return {};
    const int given = head_dim <= 64 ? 8 : 16;
    tile.consumer_registers -= given;
    tile.producer_registers += 2 * given;
    return tile;
  }

  // Whether a problem uses the small tile. Above head dim 192 a cluster is faster from 2k rows on.
  // The general form has no other tile at D96 and D128.
  static constexpr bool prefers_small_backward(int head_dim, int64_t rows, bool has_edges,
                                               bool general) {
    return head_dim > 192 ? rows < 2048 : general || (has_edges && rows <= 4096);
  }
};

}  // namespace tilewise::cuda::arch
