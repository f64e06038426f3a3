// The tile tables of mma_sync, one struct per architecture that needs its own. Each names what the
// architecture has and, per element size and head-dim tile, how the kernels are cut; a missing tile
// (warps == 0) means that no kernel is built and the simt family serves.
//
// Sources of the numbers: docs/lab/mma-sync-kernels.md.
#pragma once

#include "cuda/arch/limits.h"

namespace tilewise::cuda::arch {

inline constexpr ForwardTile kNoForward{};
inline constexpr BackwardTile kNoBackward{};

// 227 KB of shared memory, vector reductions.
struct Sm90 {
  static constexpr int kTable = 90;
  static constexpr bool kAsyncCopy = true;        // cp.async
  static constexpr bool kTma = true;          // cp.async.bulk.tensor
  static constexpr bool kVectorReduction = true;  // red.global.add.v4.f32
  static constexpr bool kWideMma = true;          // m16n8k16, bf16, tf32
  static constexpr bool kConvertsFloat8 = true;   // cvt.rn.f16x2.e4m3x2

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (element_bytes == 1) {
      if (head_dim <= 128) return {4, 32, 64, 4, 2};
      return {4, 16, 64, 3, 2};
    }
    if (element_bytes == 2) {
      if (head_dim <= 64) return {4, 32, 128, 3, 2};
      if (head_dim <= 128) return {4, 32, 64, 4, 2};
      return {4, 16, 64, 2, 2};
    }
    if (head_dim <= 64) return {4, 32, 32, 3, 2};
    if (head_dim <= 128) return tf32 ? ForwardTile{4, 32, 16, 3, 2} : ForwardTile{8, 32, 32, 0, 1};
    return {8, 16, 16, tf32 ? 3 : 0, 1};
  }

  // One warp and 16 rows: the time is that of reading keys and values, and four independent warps
  // of a multiprocessor have some 100 KB of them on their way.
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (element_bytes == 1) {
      // Rows of boxes are padded to 128 bytes. Against six stages of 64 keys: pages of 16 up
      // to 1.12.
      if (head_dim <= 128) return {1, 16, 128, 3, 4};
      return {1, 16, 64, 3, 4};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64) return {1, 16, 128, 3, 4};
    if (head_dim <= 128) return {1, 16, 64, 3, 4};
    return {1, 16, 32, 3, 4};
  }

  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2) {
      if (head_dim <= 64) return {4, 1, 32, 3, true, 2};
      if (head_dim <= 128) return {4, 2, 64, 3, true, 1};
      return {2, 4, 64, 2, false, 1};
    }
    if (head_dim <= 64) return {4, 1, 32, 2, true, 2};
    if (head_dim <= 128) return {4, 2, 32, 2, true, 1};
    return {2, 4, 32, 1, true, 1};
  }
};

// 163 KB.
struct Sm80 {
  static constexpr int kTable = 80;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (element_bytes == 1) return Sm90::forward(1, head_dim, false);
    if (element_bytes == 2 && head_dim <= 64) return {4, 32, 80, 3, 2};
    if (element_bytes == 2 && head_dim > 128) return {4, 16, 64, 2, 1};
    if (element_bytes == 2 && head_dim > 96) return {4, 32, 64, 2, 2};
    if (element_bytes == 2 && head_dim > 64) return {4, 32, 64, 3, 2};
    if (element_bytes == 4 && head_dim > 128) return {4, 16, 32, 3, 1};
    if (element_bytes == 4 && head_dim > 64) return {4, 16, 32, 3, 2};
    return Sm90::forward(element_bytes, head_dim, tf32);
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (element_bytes == 1) {
      if (head_dim <= 64) return {1, 16, 128, 4, 4};
      if (head_dim <= 128) return {1, 16, 64, 4, 4};
      return {1, 16, 32, 4, 4};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64) return {1, 16, 64, 4, 4};
    if (head_dim <= 128) return {1, 16, 32, 4, 4};
    return {1, 16, 16, 4, 4};
  }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2 && head_dim > 128) return {2, 4, 64, 1, false, 1};
    if (element_bytes == 2 && head_dim > 64) return {4, 2, 64, 2, true, 1};
    if (element_bytes == 2) return Sm90::backward(element_bytes, head_dim);
    if (head_dim <= 64) return {4, 2, 32, 2, true, 1};
    if (head_dim <= 128) return {2, 4, 32, 2, true, 1};
    return {1, 4, 32, 1, true, 1};
  }
};

// 99 KB, otherwise as sm_80.
struct Sm86 {
  static constexpr int kTable = 86;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool /*tf32*/) {
    if (element_bytes == 1) {
      if (head_dim <= 128) return {4, 32, 64, 2, 2};
      return {4, 16, 64, 2, 1};
    }
    if (element_bytes == 2) {
      if (head_dim <= 64) return {4, 32, 64, 3, 2};
      if (head_dim <= 128) return {4, 32, 32, 2, 2};
      return {4, 16, 64, 2, 1};
    }
    if (head_dim <= 64) return {4, 32, 32, 3, 1};
    if (head_dim <= 128) return {4, 16, 32, 3, 1};
    return {2, 16, 16, 3, 1};
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    if (element_bytes == 1) {
      if (head_dim <= 64) return {1, 16, 128, 3, 3};
      if (head_dim <= 128) return {1, 16, 64, 3, 3};
      return {1, 16, 32, 3, 2};
    }
    if (element_bytes != 2) return kNoForward;
    if (head_dim <= 64) return {1, 16, 64, 3, 3};
    if (head_dim <= 128) return {1, 16, 32, 3, 3};
    return {1, 16, 16, 3, 2};
  }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (element_bytes == 1) return kNoBackward;
    if (element_bytes == 2) {
      if (head_dim <= 64) return {4, 1, 32, 2, true, 1};
      if (head_dim <= 96) return {2, 2, 64, 1, false, 1};
      // Shared memory has room for one block: eight warps, which share the sums of dK and dV, hide
      // more of each other's waiting than four do, and need not spill.
      if (head_dim <= 128) return {2, 4, 64, 1, false, 1};
      return {1, 4, 32, 1, false, 1};
    }
    if (head_dim <= 64) return {2, 4, 32, 2, true, 1};  // likewise: four warps spill
    if (head_dim <= 128) return {1, 4, 32, 1, true, 1};
    return kNoBackward;
  }
};

// 99 KB with vector reductions.
struct Sm120 {
  static constexpr int kTable = 120;
  static constexpr bool kAsyncCopy = true;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = true;
  static constexpr bool kWideMma = true;
  static constexpr bool kConvertsFloat8 = true;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool tf32) {
    if (element_bytes == 4 && head_dim <= 64) return {4, 16, 64, 2, 2};
    return Sm86::forward(element_bytes, head_dim, tf32);
  }
  static constexpr ForwardTile decode(int element_bytes, int head_dim) {
    return Sm86::decode(element_bytes, head_dim);
  }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    return Sm86::backward(element_bytes, head_dim);
  }
};

// 64 KB, fp16 only, m16n8k8, no asynchronous copies.
struct Sm75 {
  static constexpr int kTable = 75;
  static constexpr bool kAsyncCopy = false;
  static constexpr bool kTma = false;
  static constexpr bool kVectorReduction = false;
  static constexpr bool kWideMma = false;
  static constexpr bool kConvertsFloat8 = false;

  static constexpr ForwardTile forward(int element_bytes, int head_dim, bool /*tf32*/) {
    if (element_bytes == 1 && head_dim > 128) return {4, 16, 32, 2, 1};
    if (element_bytes > 2) return kNoForward;
    if (head_dim <= 64) return {4, 32, 64, 3, 1};
    if (head_dim <= 128) return {4, 16, 64, 2, 1};
    return {4, 16, 16, 2, 1};
  }
  // Without asynchronous copies a warp by itself would wait for each of its loads.
  static constexpr ForwardTile decode(int, int) { return kNoForward; }
  static constexpr BackwardTile backward(int element_bytes, int head_dim) {
    if (element_bytes != 2) return kNoBackward;
    if (head_dim <= 64) return {4, 2, 32, 1, true, 1};  // eight warps: as Sm86
    if (head_dim <= 96) return {2, 2, 32, 1, false, 1};
    if (head_dim <= 128) return {2, 4, 32, 1, false, 1};
    if (head_dim <= 192) return {1, 4, 32, 1, false, 1};
    return kNoBackward;
  }
};

}  // namespace tilewise::cuda::arch
