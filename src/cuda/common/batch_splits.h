// How sequences are cut by the keys of their batch, which the GPU alone knows.
#pragma once

#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// SplitRule::parts_of_shares, where a rule has shares. Every warp sums up all lengths; the first
// ones are asked for by the constructor, so that those of a sequence follow without waiting for
// them. Left padding counts as keys. It costs speed and nothing else, and so does a sum that does
// not fit: all blocks have the same one, and `least` bounds the parts.
class BatchSplits {
 public:
  TILEWISE_DEVICE BatchSplits(const Problem& p, const SplitRule& rule)
      : lengths_(p.seqused_k), count_(rule.shares == 0 ? 0 : static_cast<int32_t>(p.batch)) {
    if (any()) load(0);
  }

  TILEWISE_DEVICE bool any() const { return count_ != 0; }

  // Of a sequence of so many keys. Called by whole warps.
  TILEWISE_DEVICE int32_t of(const SplitRule& rule, int64_t keys) {
    uint32_t sum = sum_of_lane();
#pragma unroll 1
    for (int32_t first = kAtOnce; first < count_; first += kAtOnce) {
      load(first);
      sum += sum_of_lane();
    }
    const uint32_t all = min<uint32_t>(ptx::sum(sum), INT32_MAX);
    return rule.parts_of_shares(keys, static_cast<int32_t>(all));
  }

 private:
  static constexpr int kLoads = 4;
  static constexpr int32_t kAtOnce = kLoads * ptx::kWarpSize;

  TILEWISE_DEVICE void load(int32_t first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t at = first + i * ptx::kWarpSize + ptx::lane_index();
      of_lane_[i] = at < count_ ? lengths_[at] : 0;
    }
  }
  TILEWISE_DEVICE uint32_t sum_of_lane() const {
    uint32_t sum = 0;
#pragma unroll
    for (const int32_t length : of_lane_) sum += static_cast<uint32_t>(length);
    return sum;
  }

  const int32_t* lengths_;
  int32_t count_;
  int32_t of_lane_[kLoads] = {};
};

}  // namespace tilewise::cuda
