// The sequences of a batch by the lengths of their keys, which the GPU alone knows.
#pragma once

#include "cuda/common/batch_parts.h"
#include "cuda/params.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// The longest first, in classes of a sixteenth of the longest or less, and those of a class as they
// come: who begins last is done soon. A batch of none with kLong tiles of keys keeps its order,
// since a start by it takes longer (0.6 us). Whole warps call it, a lane counts a class.
class LongestFirst {
 public:
  static constexpr int32_t kLong = 16;

  TILEWISE_DEVICE explicit LongestFirst(const ForwardParams& p)
      : p_(p), sequences_(static_cast<int32_t>(p.problem.batch)) {
    uint32_t longest = 0;
    uint32_t shortest = ~0u;
#pragma unroll 4
    for (int32_t first = 0; first < sequences_; first += kLanes) {
      const auto keys = static_cast<uint32_t>(keys_of(first));
      longest = max(longest, keys);
      if (is_there(first)) shortest = min(shortest, keys);
    }
    longest = ptx::highest(longest);
    shortest = ~ptx::highest(~shortest);
    shift_ = max(0, ptx::bit_width(longest) - kClassBits);
    in_order_ = longest >> shift_ == shortest >> shift_ ||
                static_cast<int32_t>(longest) < kLong * p.parts.tile;
  }

  // Number `n` of them.
  TILEWISE_DEVICE int32_t at(int32_t n) const {
    if (in_order_) return n;
    uint32_t own = 0;
#pragma unroll 4
    for (int32_t first = 0; first < sequences_; first += kLanes)
      own += static_cast<uint32_t>(ptx::count_ones(lanes_of_own_class(first)));
    const uint32_t to_lane = ptx::sum_to_lane(own);
    const auto its = static_cast<int32_t>(ptx::sum(to_lane <= static_cast<uint32_t>(n) ? 1u : 0u));
    n -= static_cast<int32_t>(ptx::shuffle(to_lane - own, its));
    int32_t first = 0;
    uint32_t lanes = 0;
#pragma unroll 1
    for (;; first += kLanes) {
      lanes = ptx::ballot(is_there(first) && class_of(first) == its);
      const int here = ptx::count_ones(lanes);
      if (n < here || first + kLanes >= sequences_) break;
      n -= here;
    }
    const uint32_t before = lanes & ((1u << ptx::lane_index()) - 1);
    const bool is_it = (lanes >> ptx::lane_index() & 1) != 0 && ptx::count_ones(before) == n;
    return first + ptx::bit_width(ptx::ballot(is_it)) - 1;
  }

 private:
  static constexpr int kLanes = ptx::kWarpSize;
  static constexpr int kClassBits = 5;

  // Of the lane's sequence of the 32 from `first` on.
  TILEWISE_DEVICE bool is_there(int32_t first) const {
    return first + ptx::lane_index() < sequences_;
  }
  TILEWISE_DEVICE int32_t keys_of(int32_t first) const {
    return is_there(first) ? keys_in_use(p_.problem, first + ptx::lane_index()) : 0;
  }
  TILEWISE_DEVICE int32_t class_of(int32_t first) const {
    return kLanes - 1 - (keys_of(first) >> shift_);
  }

  // Those of the 32 sequences whose class has the number of this lane.
  TILEWISE_DEVICE uint32_t lanes_of_own_class(int32_t first) const {
    const int32_t its = class_of(first);
    uint32_t lanes = ptx::ballot(is_there(first));
#pragma unroll
    for (int bit = 0; bit < kClassBits; ++bit) {
      const uint32_t set = ptx::ballot((its >> bit & 1) != 0);
      lanes &= (ptx::lane_index() >> bit & 1) != 0 ? set : ~set;
    }
    return lanes;
  }

  const ForwardParams& p_;
  int32_t sequences_;
  int shift_;  // from keys to classes
  bool in_order_;
};

}  // namespace tilewise::cuda
