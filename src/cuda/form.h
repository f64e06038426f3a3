// The forms of a kernel, and the limits that planner and kernels share.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// Which options and layouts each form serves:
//   plain      fast path: options that cost nothing in the inner loop (scale, band, lengths, GQA,
//              sinks)
//   general    adds softcap, ALiBi, bias, dropout, pages and out in fp32 as uniform branches; of
//              simt and mma_sync also any alignment, of wgmma also packed heads and key splits
//   masked     adds a mask: to the general form of mma_sync, to the fast path of wgmma
//   paged      mma_sync forward: the fast path over a block table
//   tma        mma_sync forward: the fast path with K and V loaded by TMA
//   tma_paged  mma_sync forward: both
enum class Form : int32_t { plain, general, masked, paged, tma, tma_paged };

// Whether a form of mma_sync has all options of the general one.
constexpr bool includes_general(Form form) { return form == Form::general || form == Form::masked; }

// Rows of the smallest page that TMA loads.
inline constexpr int32_t kMinTmaPageRows = 16;

// Rows of the TMA boxes that load the last, partial key tile of a sequence. Small boxes take longer
// to issue; large ones read rows past the last key. "8, all": boxes of 8 rows, of which those past
// the last key are loaded as well.
//   H200, us, rows per box             8, all  8     16    32    whole tile
//   B1, 992 keys                         7.0   6.5   6.2   6.0   6.0
//   B32, log-normal up to 1k, 32/32      42.3  41.8  42.4  43.3  45.1
inline constexpr int32_t kTailBoxRows = 16;

// A batch index outside of every tensor map: TMA fills such a box with 0 and reads nothing.
inline constexpr int32_t kOutOfBounds = -1;

// Maximum number of decode splits that a cluster combines: the largest (non-portable) cluster size.
inline constexpr int32_t kMaxClusterSplits = 16;

// Maximum number of warps of a CTA that share the keys of its tile (intra-CTA split-K).
inline constexpr int32_t kMaxWarpsPerTile = 2;

// Stages of a warp's pipeline if as many stages as fit would have more bytes in flight than it
// takes to saturate memory.
inline constexpr int32_t kReducedStages = 2;

// Whether kernels with two warps per tile exist. They do for head dimensions that are common in
// models and leave room for two such CTAs per SM. (For float8, more CTAs are faster than more warps
// per CTA.)
constexpr bool has_warp_split(int head_dim, int bytes) {
  return bytes == 2 && (head_dim == 64 || head_dim == 128);
}

}  // namespace tilewise::cuda
