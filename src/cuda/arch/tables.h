// The tile tables of mma_sync, one struct per architecture that needs its own. Each lists the
// features of the architecture and, per element size and head-dim tile, the tiles of the kernels.
// Where a tile is missing (warps == 0), no kernel is built and the simt family serves the problem.
//
// Sources of the numbers: docs/lab/mma-sync-kernels.md.
#pragma once

#include "cuda/arch/limits.h"

namespace tilewise::cuda::arch {

inline constexpr ForwardTile kNoForward{};
inline constexpr BackwardTile kNoBackward{};

// The columns of out for whose sums a warp has registers. Beyond them there are tiles with two
// column warps (ForwardTile::column_warps), which mma_sync/instances.h builds for 16-bit elements
// alone, and no decode tiles. Decoding splits the keys of the forward tiles: by estimate, a CTA of
// 64 rows multiplies keys as fast as memory delivers them.
inline constexpr int kMaxColumnsOfWarp = 256;
constexpr ForwardTile wide_tile(int warps, int keys, int stages) {
  return {.warps = warps,
          .warp_rows = 16,
          .keys = keys,
          .stages = stages,
          .blocks_per_sm = 1,
          .column_warps = 2};
}

// The tiles of latent caches of 576 columns with 512 values (mma_sync/forward_latent_pipeline.h),
// whose stages hold K and V at once. `latent_forward` is for the rows of many heads, like
// wide_tile; `latent_decode` for at most 16 rows, whose four column warps hold 128 columns each.
constexpr ForwardTile latent_decode_tile(int keys, int stages, int blocks_per_sm) {
  return {.warps = 4,
          .warp_rows = 16,
          .keys = keys,
          .stages = stages,
          .blocks_per_sm = blocks_per_sm,
          .column_warps = 4};
}

// At head dimension 512, dK and dV of 32 keys take half of the registers of an SM: a CTA can own no
// more keys or columns. With 99 KB of shared memory there is no such tile, since K and V of 32 keys
// alone take 64 KB, and 48 KB at head dimension 384.
inline constexpr int kMaxBackwardColumns = 512;
constexpr BackwardTile wide_backward_tile(int head_dim, int queries) {
  if (head_dim > kMaxBackwardColumns) return kNoBackward;
  return {.key_warps = 1,
          .query_warps = 8,
          .queries = queries,
          .stages = 1,
          .early_barrier = false,
          .blocks_per_sm = 1,
          .column_warps = 2};
}

// 227 KB of shared memory per CTA, TMA, vector reductions.
struct Sm90 {
  static constexpr int kTable = 90;
  static constexpr bool kAsyncCopy = true;        // cp.async
  static constexpr bool kTma = true;              // cp.async.bulk.tensor
  static constexpr bool kVectorReduction = true;  // red.global.add.v4.f32
  static constexpr bool kWideMma = true;          // m16n8k16, bf16, tf32
  static constexpr bool kConvertsFloat8 = true;   // cvt.rn.f16x2.e4m3x2

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (head_dim > 384) return wide_tile(8, 64, 2);
    if (head_dim > kMaxColumnsOfWarp) return wide_tile(8, 64, 3);
    if (element_bytes == 1) {
      if (head_dim <= 128)
        return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 4, .blocks_per_sm = 2};
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 3, .blocks_per_sm = 2};
    }
    if (element_bytes == 2) {
      if (head_dim <= 64)
        return {.warps = 4, .warp_rows = 32, .keys = 128, .stages = 3, .blocks_per_sm = 2};
      if (head_dim <= 128)
        return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 4, .blocks_per_sm = 2};
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 2};
    }
    if (head_dim <= 64)
      return {.warps = 4, .warp_rows = 32, .keys = 32, .stages = 3, .blocks_per_sm = 2};
    if (head_dim <= 128)
      return tf32 ? ForwardTile{.warps = 4,
                                .warp_rows = 32,
                                .keys = 16,
                                .stages = 3,
                                .blocks_per_sm = 2}
                  : ForwardTile{
                        .warps = 8, .warp_rows = 32, .keys = 32, .stages = 0, .blocks_per_sm = 1};
    return {.warps = 8, .warp_rows = 16, .keys = 16, .stages = tf32 ? 3 : 0, .blocks_per_sm = 1};
  }

  // Tiles of one warp and 16 rows: decoding takes as long as reading the keys and values, and four
  // independent warps per SM keep about 100 KB of them in flight.
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return kNoForward;
    if (element_bytes == 1) {
      // The same tile for D64 and D128: a row of a TMA box takes 128 bytes of shared memory even if
      // the row of the tensor has only 64. With pages of 16 keys this tile is up to 1.12 times as
      // fast as one of 64 keys and six stages.
      if (head_dim <= 128)
        return {.warps = 1, .warp_rows = 16, .keys = 128, .stages = 3, .blocks_per_sm = 4};
      return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 3, .blocks_per_sm = 4};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64)
      return {.warps = 1, .warp_rows = 16, .keys = 128, .stages = 3, .blocks_per_sm = 4};
    if (head_dim <= 128)
      return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 3, .blocks_per_sm = 4};
    return {.warps = 1, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 4};
  }

  static constexpr ForwardTile latent_forward() { return wide_tile(8, 32, 3); }
  // Two CTAs keep up to 72 KB in flight and leave no room for a third stage.
  static constexpr ForwardTile latent_decode() { return latent_decode_tile(32, 2, 2); }

  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return wide_backward_tile(head_dim, 64);
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2) {
      if (head_dim <= 64)
        return {.key_warps = 4,
                .query_warps = 1,
                .queries = 32,
                .stages = 3,
                .early_barrier = true,
                .blocks_per_sm = 2};
      if (head_dim <= 128)
        return {.key_warps = 4,
                .query_warps = 2,
                .queries = 64,
                .stages = 3,
                .early_barrier = true,
                .blocks_per_sm = 1};
      return {.key_warps = 2,
              .query_warps = 4,
              .queries = 64,
              .stages = 2,
              .early_barrier = false,
              .blocks_per_sm = 1};
    }
    if (head_dim <= 64)
      return {.key_warps = 4,
              .query_warps = 1,
              .queries = 32,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 2};
    if (head_dim <= 128)
      return {.key_warps = 4,
              .query_warps = 2,
              .queries = 32,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 1};
    return {.key_warps = 2,
            .query_warps = 4,
            .queries = 32,
            .stages = 1,
            .early_barrier = true,
            .blocks_per_sm = 1};
  }
};

// 163 KB of shared memory per CTA.
struct Sm80 {
  static constexpr int kTable = 80;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (head_dim > 384) return wide_tile(8, 32, 2);
    if (head_dim > kMaxColumnsOfWarp) return wide_tile(8, 32, 3);
    if (element_bytes == 1) return Sm90::forward(1, head_dim, false);
    if (element_bytes == 2 && head_dim <= 64)
      return {.warps = 4, .warp_rows = 32, .keys = 80, .stages = 3, .blocks_per_sm = 2};
    if (element_bytes == 2 && head_dim > 128)
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 1};
    if (element_bytes == 2 && head_dim > 96)
      return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 2, .blocks_per_sm = 2};
    if (element_bytes == 2 && head_dim > 64)
      return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 3, .blocks_per_sm = 2};
    if (element_bytes == 4 && head_dim > 128)
      return {.warps = 4, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 1};
    if (element_bytes == 4 && head_dim > 64)
      return {.warps = 4, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 2};
    return Sm90::forward(element_bytes, head_dim, tf32);
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return kNoForward;
    if (element_bytes == 1) {
      if (head_dim <= 64)
        return {.warps = 1, .warp_rows = 16, .keys = 128, .stages = 4, .blocks_per_sm = 4};
      if (head_dim <= 128)
        return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 4, .blocks_per_sm = 4};
      return {.warps = 1, .warp_rows = 16, .keys = 32, .stages = 4, .blocks_per_sm = 4};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64)
      return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 4, .blocks_per_sm = 4};
    if (head_dim <= 128)
      return {.warps = 1, .warp_rows = 16, .keys = 32, .stages = 4, .blocks_per_sm = 4};
    return {.warps = 1, .warp_rows = 16, .keys = 16, .stages = 4, .blocks_per_sm = 4};
  }
  static constexpr ForwardTile latent_forward() { return wide_tile(8, 32, 2); }
  static constexpr ForwardTile latent_decode() { return latent_decode_tile(16, 3, 2); }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return wide_backward_tile(head_dim, 32);
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2 && head_dim > 128)
      return {.key_warps = 2,
              .query_warps = 4,
              .queries = 64,
              .stages = 1,
              .early_barrier = false,
              .blocks_per_sm = 1};
    if (element_bytes == 2 && head_dim > 64)
      return {.key_warps = 4,
              .query_warps = 2,
              .queries = 64,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 1};
    if (element_bytes == 2) return Sm90::backward(element_bytes, head_dim);
    if (head_dim <= 64)
      return {.key_warps = 4,
              .query_warps = 2,
              .queries = 32,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 1};
    if (head_dim <= 128)
      return {.key_warps = 2,
              .query_warps = 4,
              .queries = 32,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 1};
    return {.key_warps = 1,
            .query_warps = 4,
            .queries = 32,
            .stages = 1,
            .early_barrier = true,
            .blocks_per_sm = 1};
  }
};

// 99 KB of shared memory per CTA; otherwise like sm_80.
struct Sm86 {
  static constexpr int kTable = 86;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool /*tf32*/) {
    if (head_dim > 384) return wide_tile(4, 16, 3);
    if (head_dim > kMaxColumnsOfWarp) return wide_tile(4, 32, 2);
    if (element_bytes == 1) {
      if (head_dim <= 128)
        return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 2, .blocks_per_sm = 2};
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 1};
    }
    if (element_bytes == 2) {
      if (head_dim <= 64)
        return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 3, .blocks_per_sm = 2};
      if (head_dim <= 128)
        return {.warps = 4, .warp_rows = 32, .keys = 32, .stages = 2, .blocks_per_sm = 2};
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 1};
    }
    if (head_dim <= 64)
      return {.warps = 4, .warp_rows = 32, .keys = 32, .stages = 3, .blocks_per_sm = 1};
    if (head_dim <= 128)
      return {.warps = 4, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 1};
    return {.warps = 2, .warp_rows = 16, .keys = 16, .stages = 3, .blocks_per_sm = 1};
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return kNoForward;
    if (element_bytes == 1) {
      if (head_dim <= 64)
        return {.warps = 1, .warp_rows = 16, .keys = 128, .stages = 3, .blocks_per_sm = 3};
      if (head_dim <= 128)
        return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 3, .blocks_per_sm = 3};
      return {.warps = 1, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 2};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64)
      return {.warps = 1, .warp_rows = 16, .keys = 64, .stages = 3, .blocks_per_sm = 3};
    if (head_dim <= 128)
      return {.warps = 1, .warp_rows = 16, .keys = 32, .stages = 3, .blocks_per_sm = 3};
    return {.warps = 1, .warp_rows = 16, .keys = 16, .stages = 3, .blocks_per_sm = 2};
  }
  static constexpr ForwardTile latent_forward() { return wide_tile(4, 16, 3); }
  static constexpr ForwardTile latent_decode() { return latent_decode_tile(16, 4, 1); }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return kNoBackward;
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2) {
      if (head_dim <= 64)
        return {.key_warps = 4,
                .query_warps = 1,
                .queries = 32,
                .stages = 2,
                .early_barrier = true,
                .blocks_per_sm = 1};
      if (head_dim <= 96)
        return {.key_warps = 2,
                .query_warps = 2,
                .queries = 64,
                .stages = 1,
                .early_barrier = false,
                .blocks_per_sm = 1};
      // Only one CTA per SM fits into shared memory. Eight warps, which share the sums of dK and
      // dV, hide more of each other's latency than four do, and do not spill.
      if (head_dim <= 128)
        return {.key_warps = 2,
                .query_warps = 4,
                .queries = 64,
                .stages = 1,
                .early_barrier = false,
                .blocks_per_sm = 1};
      return {.key_warps = 1,
              .query_warps = 4,
              .queries = 32,
              .stages = 1,
              .early_barrier = false,
              .blocks_per_sm = 1};
    }
    // Eight warps here as well, since four spill.
    if (head_dim <= 64)
      return {.key_warps = 2,
              .query_warps = 4,
              .queries = 32,
              .stages = 2,
              .early_barrier = true,
              .blocks_per_sm = 1};
    if (head_dim <= 128)
      return {.key_warps = 1,
              .query_warps = 4,
              .queries = 32,
              .stages = 1,
              .early_barrier = true,
              .blocks_per_sm = 1};
    return kNoBackward;
  }
};

// 99 KB of shared memory per CTA, with vector reductions.
struct Sm120 {
  static constexpr int kTable = 120;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = true;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = true;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (element_bytes == 4 && head_dim <= 64)
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 2};
    return Sm86::forward(element_bytes, head_dim, tf32);
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    return Sm86::decode(element_bytes, head_dim);
  }
  static constexpr ForwardTile latent_forward() { return Sm86::latent_forward(); }
  static constexpr ForwardTile latent_decode() { return Sm86::latent_decode(); }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    return Sm86::backward(element_bytes, head_dim);
  }
};

// 64 KB of shared memory per CTA, fp16 only, m16n8k8, no asynchronous copies.
struct Sm75 {
  static constexpr int kTable = 75;
  static constexpr bool kAsyncCopy = false;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = false;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool /*tf32*/) {
    if (head_dim > kMaxColumnsOfWarp) return kNoForward;
    if (element_bytes == 1 && head_dim > 128)
      return {.warps = 4, .warp_rows = 16, .keys = 32, .stages = 2, .blocks_per_sm = 1};
    if (element_bytes > 2) return kNoForward;
    if (head_dim <= 64)
      return {.warps = 4, .warp_rows = 32, .keys = 64, .stages = 3, .blocks_per_sm = 1};
    if (head_dim <= 128)
      return {.warps = 4, .warp_rows = 16, .keys = 64, .stages = 2, .blocks_per_sm = 1};
    return {.warps = 4, .warp_rows = 16, .keys = 16, .stages = 2, .blocks_per_sm = 1};
  }
  // There is no decode tile: without asynchronous copies a single warp would wait for each load.
  static constexpr ForwardTile decode(int, int) { return kNoForward; }
  static constexpr ForwardTile latent_forward() { return kNoForward; }
  static constexpr ForwardTile latent_decode() { return kNoForward; }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (head_dim > kMaxColumnsOfWarp) return kNoBackward;
    if (element_bytes != 2) return kNoBackward;
    // Eight warps, for the reasons given in Sm86.
    if (head_dim <= 64)
      return {.key_warps = 4,
              .query_warps = 2,
              .queries = 32,
              .stages = 1,
              .early_barrier = true,
              .blocks_per_sm = 1};
    if (head_dim <= 96)
      return {.key_warps = 2,
              .query_warps = 2,
              .queries = 32,
              .stages = 1,
              .early_barrier = false,
              .blocks_per_sm = 1};
    if (head_dim <= 128)
      return {.key_warps = 2,
              .query_warps = 4,
              .queries = 32,
              .stages = 1,
              .early_barrier = false,
              .blocks_per_sm = 1};
    if (head_dim <= 192)
      return {.key_warps = 1,
              .query_warps = 4,
              .queries = 32,
              .stages = 1,
              .early_barrier = false,
              .blocks_per_sm = 1};
    return kNoBackward;
  }
};

// The tile of the tangents of out and lse. The four stages hold K, K', V and V'. At D64, 64 keys
// would spill; with Q and Q', the stages take 56 KB at D64 and 96 KB at D128.
template <class Arch>
constexpr ForwardTile jvp_tile(int element_bytes, int head_dim) {
  const bool built = element_bytes == 2 && (head_dim == 64 || head_dim == 128);
  if (!Arch::kAsyncCopy || !built) return kNoForward;
  const int keys = head_dim == 64 ? 48 : 32;
  return {.warps = 4, .warp_rows = 32, .keys = keys, .stages = 4, .blocks_per_sm = 2};
}

// The tiles of the second derivatives: of rows that walk keys, and of keys that walk rows. The
// stages hold the four operands that are walked; with those that the CTA owns they take 80 or 72 KB
// at D64 and 96 KB at D128, which also fits the 99 KB of sm_86. A warp holds four tiles of factors
// beside its sums, so that it has 32 rows only where D is 64.
template <class Arch>
constexpr ForwardTile second_rows_tile(int element_bytes, int head_dim) {
  if (jvp_tile<Arch>(element_bytes, head_dim).warps == 0) return kNoForward;
  const int rows = head_dim == 64 ? 32 : 16;
  return {.warps = 4, .warp_rows = rows, .keys = 32, .stages = 4, .blocks_per_sm = 2};
}
template <class Arch>
constexpr ForwardTile second_keys_tile(int element_bytes, int head_dim) {
  ForwardTile tile = second_rows_tile<Arch>(element_bytes, head_dim);
  if (head_dim == 64) tile.keys = 16;  // there are the sums of dK and those of dV
  return tile;
}

}  // namespace tilewise::cuda::arch
