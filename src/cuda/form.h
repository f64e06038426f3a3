// The forms of a kernel: what its loop has to be ready for.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// `plain` has what costs nothing in the inner loop (scale, band, lengths, groups, sinks);
// `general` adds softcap, ALiBi, bias, dropout, pages and any alignment as uniform switches.
// Of mma_sync's forward alone: `paged` is `plain` over a block table, `boxes` is `plain` with keys
// and values that come as boxes of TMA, and `tma_paged` is both.
enum class Form : int32_t { plain, general, paged, tma, tma_paged };

// Rows of the smallest page that comes as boxes.
inline constexpr int32_t kMinTmaPageRows = 16;

// Rows of the boxes that the last keys of a sequence come in, where they are less than a tile. A
// box takes its time to be asked for, and a row is to be read. (H200, of 8 with those behind the
// keys, of 8, 16 and 32: B1 with 992 keys 7.0, 6.5, 6.2, 6.0 us, of a whole tile 6.0; log-normal,
// B32 with 1k and 32/32 heads 42.3, 41.8, 42.4, 43.3, 45.1.)
inline constexpr int32_t kTailBoxRows = 16;

// A sequence or page outside of every map: a box of it arrives as 0, and nothing is read.
inline constexpr int32_t kOutOfBounds = -1;

// Splits of a decode that a cluster merges: the most blocks that a cluster can have.
inline constexpr int32_t kMaxClusterSplits = 16;

// Warps of a block that share the keys of its tile (mma_sync/forward_warp_split.h).
inline constexpr int32_t kMaxWarpsPerTile = 2;

// Slots of the ring of a warp, where all would have more on its way than memory needs.
inline constexpr int32_t kReducedStages = 2;

// The head dimensions that have them: where two such blocks find room on a multiprocessor, and
// models are. (More blocks, not more warps of one, read float8.)
constexpr bool has_warp_split(int head_dim, int bytes) {
  return bytes == 2 && (head_dim == 64 || head_dim == 128);
}

}  // namespace tilewise::cuda
