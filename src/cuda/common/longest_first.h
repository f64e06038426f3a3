// LPT order (longest processing time first) of a batch whose key lengths only the GPU knows.
#pragma once

#include "cuda/common/batch_chunks.h"
#include "cuda/params.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// Sequences with more keys than the mean come first; both groups keep the order of the batch. So
// the CTAs that start last are done soon. A batch whose mean is below kShort key tiles keeps its
// order, because finding the order would delay the start by more than it gains. Whole warps call
// it.
class LongestFirst {
 public:
  static constexpr int32_t kShort = 4;

  TILEWISE_DEVICE explicit LongestFirst(const ForwardParams& p)
      : p_(p), sequences_(static_cast<int32_t>(p.problem.batch)) {
    uint32_t keys = 0;
#pragma unroll 4
    for (int32_t first = 0; first < sequences_; first += kLanes)
      keys += static_cast<uint32_t>(keys_of(first));
    keys_ = static_cast<int32_t>(ptx::sum(keys));
    if (keys_ < sequences_ * kShort * p.chunks.tile) return;
#pragma unroll 4
    for (int32_t first = 0; first < sequences_; first += kLanes)
      long_ += ptx::count_ones(lanes_of(true, first));
  }

  // The sequence at position `n` of the order.
  TILEWISE_DEVICE int32_t at(int32_t n) const {
    if (long_ == 0) return n;
    const bool is_long = n < long_;
    if (!is_long) n -= long_;
    int32_t first = 0;
    uint32_t lanes = 0;
#pragma unroll 1
    for (;; first += kLanes) {
      lanes = lanes_of(is_long, first);
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

  // Keys of sequence first + lane.
  TILEWISE_DEVICE int32_t keys_of(int32_t first) const {
    const int32_t sequence = first + ptx::lane_index();
    return sequence < sequences_ ? keys_in_use(p_, sequence) : 0;
  }

  // Mask of the sequences among [first, first + 32) that are long, or of those that are not.
  TILEWISE_DEVICE uint32_t lanes_of(bool are_long, int32_t first) const {
    const bool is_long = int64_t{keys_of(first)} * sequences_ > keys_;
    return ptx::ballot(first + ptx::lane_index() < sequences_ && is_long == are_long);
  }

  const ForwardParams& p_;
  int32_t sequences_;
  int32_t keys_;      // of the batch
  int32_t long_ = 0;  // number of sequences with more keys than the mean; 0: keep the order
};

}  // namespace tilewise::cuda
