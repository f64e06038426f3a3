// The query tiles of a backward's key tile that need no mask.
#pragma once

#include "attention/band.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda::common {

// Larger than every row and key of a sequence.
inline constexpr int32_t kMaxRow = 1 << 30;

// Query tiles whose first row is in this range need no mask: all their rows see all keys of the
// CTA. Rows past the last one of the sequence need none either, because their P is 0.
struct UnmaskedRows {
  int32_t begin;
  int32_t end;

  TILEWISE_DEVICE bool contains(int32_t row) const { return row >= begin && row < end; }
};

}  // namespace tilewise::cuda::common
