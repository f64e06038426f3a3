// The band, seen from the keys of a thread.
#pragma once

#include "cuda/wgmma/backward_consumer.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

template <class C>
class KeyMask {
  using Plan = BackwardPlan<C>;

 public:
  // `key`: the thread's first key, in the CTA. Its other key is 8 further on.
  TILEWISE_DEVICE KeyMask(const TileDescriptor& work_tile, int key)
      : unmasked_(unmasked_rows(work_tile)) {
    const int32_t diagonal = work_tile.key + key;
    const int32_t lane_row = ptx::lane_index() % 4 * 2;
    rows_ = static_cast<uint32_t>(work_tile.high) - static_cast<uint32_t>(work_tile.low);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool in_use = key + 8 * half < work_tile.key_count;
      first_[half] = (in_use ? diagonal + 8 * half - work_tile.high : common::kMaxRow) - lane_row;
    }
  }

  // Whether the query tile that starts at `row` needs the mask.
  TILEWISE_DEVICE bool touches(int32_t row) const { return !unmasked_.contains(row); }

  // Scores of keys that a row does not see become `hidden`.
  TILEWISE_DEVICE void apply(ScoreSums<C>& s, int32_t row, float hidden) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = static_cast<uint32_t>(row) - static_cast<uint32_t>(first_[half]);
#pragma unroll
      for (int j = 0; j < Plan::kQueries / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (from + static_cast<uint32_t>(8 * j + e) > rows_) s[4 * j + 2 * half + e] = hidden;
        }
      }
    }
  }

 private:
  int32_t first_[2];  // first row that sees the key, less the thread's first row of a tile
  uint32_t rows_;     // how many rows after it see the key
  common::UnmaskedRows unmasked_;
};

}  // namespace tilewise::cuda::wgmma
