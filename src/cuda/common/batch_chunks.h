// How sequences are cut by the keys of their batch, which the GPU alone knows.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// The chunks of all sequences lie in one line: the first ones of all, which a block finds in a
// moment, and then the later_chunks, those of a sequence after each later. A part of it.
struct KeyChunk {
  int32_t sequence;  // -1: past the end of the line
  int32_t split;
  int32_t splits;  // of the sequence
};

// Keys of a sequence, whose number the GPU knows: key_count, with seqused_k. Whatever the arrays
// contain it is from 0 to `max_keys`, so that no sum over a batch overflows.
TILEWISE_DEVICE int32_t keys_in_use(const ForwardParams& params, int32_t sequence) {
  const Problem& p = params.problem;
  const int32_t padding = p.leftpad_k != nullptr ? max(0, p.leftpad_k[sequence]) : 0;
  return max(0, min(max(0, p.seqused_k[sequence]) - padding, params.max_keys));
}

// A warp sums up the lengths of a batch and counts the chunks: whole warps call it. A lane has some
// sequences that follow each later. Loops, not many instructions: a launch waits for each of them.
class BatchChunks {
 public:
  TILEWISE_DEVICE explicit BatchChunks(const ForwardParams& p)
      : p_(p),
        sequences_(static_cast<int32_t>(p.problem.batch)),
        sequences_per_lane_((sequences_ + kLanes - 1) / kLanes) {
    uint32_t keys = 0;
    uint32_t longest = 0;
#pragma unroll 4
    for (int32_t i = 0; i < sequences_per_lane_; ++i) {
      const int32_t sequence = ptx::lane_index() * sequences_per_lane_ + i;
      const auto own = static_cast<uint32_t>(sequence < sequences_ ? keys_of(sequence) : 0);
      keys += own;
      longest = max(longest, own);
    }
    const ChunkSchedule::Batch batch = {sequences_, static_cast<int32_t>(ptx::sum(keys)),
                                        static_cast<int32_t>(ptx::highest(longest))};
    chunk_size_ = p.chunks.first_chunk_size(batch);
#pragma unroll 1
    for (int attempt = 0;; ++attempt) {
      reciprocal_ = ptx::rcp_approximate(static_cast<float>(chunk_size_));
      later_chunks_ = later_chunks_of_lane();
      const int32_t chunks =
          sequences_ + static_cast<int32_t>(ptx::sum(static_cast<uint32_t>(later_chunks_)));
      if (chunks <= p.chunks.max_chunks) break;
      chunk_size_ = p.chunks.next_chunk_size(batch, attempt, chunk_size_, chunks);
    }
  }

  // Parts of a sequence.
  TILEWISE_DEVICE int32_t count(int32_t sequence) const { return count_of(keys_of(sequence)); }

  // What is at `index` of the line.
  TILEWISE_DEVICE KeyChunk find(int32_t index) const {
    if (index < sequences_) return {index, 0, count(index)};
    const int32_t through_lane = inclusive_sum(later_chunks_);
    const int32_t later = index - sequences_;
    const int lane = static_cast<int>(ptx::sum(through_lane <= later ? 1u : 0u));
    if (lane == kLanes) return {-1, 0, 0};
    int32_t split = later - from_lane(through_lane - later_chunks_, lane) + 1;
    int32_t sequence = lane * sequences_per_lane_;
    int32_t splits = count(sequence);
#pragma unroll 1
    while (split >= splits) {
      split -= splits - 1;
      splits = count(++sequence);
    }
    return {sequence, split, splits};
  }

  // Where the second part of a sequence is in the line.
  TILEWISE_DEVICE int32_t second_chunk(int32_t sequence) const {
    const int lane = sequence / sequences_per_lane_;
    int32_t second = sequences_ + from_lane(inclusive_sum(later_chunks_) - later_chunks_, lane);
#pragma unroll 1
    for (int32_t before = lane * sequences_per_lane_; before < sequence; ++before)
      second += count(before) - 1;
    return second;
  }

 private:
  static constexpr int kLanes = ptx::kWarpSize;

  TILEWISE_DEVICE int32_t keys_of(int32_t sequence) const { return keys_in_use(p_, sequence); }

  // ChunkSchedule::count of fewer than 2^21 chunks, with a reciprocal: a GPU divides integers in
  // three times as many instructions.
  TILEWISE_DEVICE int32_t count_of(int32_t keys) const {
    const int32_t n = max(1, keys) - 1;
    const auto quotient = static_cast<int32_t>(static_cast<float>(n) * reciprocal_);
    const int32_t rest = n - quotient * chunk_size_;  // the quotient may be 1 less or more
    return quotient + 1 + (rest >= chunk_size_ ? 1 : 0) - (rest < 0 ? 1 : 0);
  }

  // Parts of the sequences of this lane but their first ones.
  TILEWISE_DEVICE int32_t later_chunks_of_lane() const {
    const int32_t first = ptx::lane_index() * sequences_per_lane_;
    int32_t later_chunks = 0;
#pragma unroll 1
    for (int32_t i = 0; i < sequences_per_lane_; ++i)
      if (first + i < sequences_) later_chunks += count_of(keys_of(first + i)) - 1;
    return later_chunks;
  }

  TILEWISE_DEVICE static int32_t from_lane(int32_t x, int lane) {
    return static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(x), lane));
  }
  TILEWISE_DEVICE static int32_t inclusive_sum(int32_t x) {
    return static_cast<int32_t>(ptx::sum_to_lane(static_cast<uint32_t>(x)));
  }

  const ForwardParams& p_;
  int32_t sequences_;
  int32_t sequences_per_lane_;
  int32_t chunk_size_;        // keys
  float reciprocal_;          // of it
  int32_t later_chunks_ = 0;  // chunks of the sequences of this lane but their first ones
};

}  // namespace tilewise::cuda
