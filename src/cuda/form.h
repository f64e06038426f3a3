// The forms of a kernel: what its loop has to be ready for.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// `plain` has what costs nothing in the inner loop (scale, band, lengths, groups, sinks);
// `general` adds softcap, ALiBi, bias, dropout, pages and any alignment as uniform switches.
// Of mma_sync's forward alone: `paged` is `plain` over a block table, `boxes` is `plain` with keys
// and values that come as boxes of TMA, and `paged_boxes` is both.
enum class Form : int32_t { plain, general, paged, boxes, paged_boxes };

// Rows of the smallest page that comes as boxes.
inline constexpr int32_t kLeastRowsOfPageBox = 16;

// Rows of the boxes that the last keys of a sequence come in, where they are less than a tile.
inline constexpr int32_t kRowsOfEndBox = 8;

// A sequence or page outside of every map: a box of it arrives as 0, and nothing is read.
inline constexpr int32_t kNowhere = -1;

// Splits of a decode that a cluster merges: the most blocks that a cluster can have.
inline constexpr int32_t kMostMergedSplits = 16;

// Warps of a block that share the keys of its tile (mma_sync/forward_readers.h).
inline constexpr int32_t kMostReaders = 2;

}  // namespace tilewise::cuda
