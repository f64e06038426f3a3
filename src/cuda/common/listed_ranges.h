// The ranges of a mask that concern a CTA, in shared memory: a few of the many that a long sequence
// may have.
#pragma once

#include "attention/mask.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

template <int kMaxListed>
struct ListedRanges {
  int32_t entries[kMaxListed];

  // The mask with only the ranges that touch the rows and keys, in their order. A mask of blocks,
  // or one with more than kMaxListed such ranges, is returned as it is. One whole warp calls it.
  TILEWISE_DEVICE Mask list(const Mask& all, Range rows, Range keys) {
    if (!all.is_ranges()) return all;
    const int lane = ptx::lane_index();
    int32_t count = 0;
#pragma unroll 1
    for (int64_t first = 0; first < all.range_count(); first += ptx::kWarpSize) {
      const int64_t i = first + lane;
      const bool touches = i < all.range_count() && all.touches(i, rows, keys);
      const uint32_t found = ptx::ballot(touches);
      const int32_t at = count + ptx::count_ones(found & ((1u << lane) - 1));
      if (touches && at < kMaxListed) entries[at] = static_cast<int32_t>(all.entry_of_range(i));
      count += ptx::count_ones(found);
    }
    return count <= kMaxListed ? all.with_ranges(entries, count) : all;
  }
};

}  // namespace tilewise::cuda::common
