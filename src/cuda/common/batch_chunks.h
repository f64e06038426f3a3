// The device side of ChunkSchedule (attention/schedule.h): how the sequences of a varlen batch are
// cut into chunks when only the GPU knows their lengths.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// One chunk. The chunks of a batch are numbered: number i below the number of sequences is the
// first chunk of sequence i, which a CTA knows without counting; the later chunks follow, sequence
// by sequence.
struct KeyChunk {
  int32_t sequence;  // -1: the batch has no such chunk
  int32_t split;     // number of the chunk in its sequence
  int32_t splits;    // of the sequence
};

// Number of keys of a sequence, from seqused_k and leftpad_k. It is clamped to [0, max_keys]
// whatever these arrays contain, so no sum over a batch overflows.
TILEWISE_DEVICE int32_t keys_in_use(const ForwardParams& params, int32_t sequence) {
  const Problem& p = params.problem;
  const int32_t padding = p.leftpad_k != nullptr ? max(0, p.leftpad_k[sequence]) : 0;
  return max(0, min(max(0, p.seqused_k[sequence]) - padding, params.max_keys));
}

// Chooses the chunk size of a batch and maps chunk numbers to sequences. Whole warps call every
// function; a lane adds up a run of consecutive sequences. The loops are barely unrolled because a
// kernel that has just started waits for each line of instructions to be fetched.
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
      const auto sequence_keys =
          static_cast<uint32_t>(sequence < sequences_ ? keys_of(sequence) : 0);
      keys += sequence_keys;
      longest = max(longest, sequence_keys);
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

  // Chunks of a sequence.
  TILEWISE_DEVICE int32_t count(int32_t sequence) const { return count_of(keys_of(sequence)); }

  // The chunk with number `index`.
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

  // Number of the second chunk of a sequence.
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

  // ChunkSchedule::count with a reciprocal, exact below 2^21 chunks: an integer division takes
  // three times as many instructions on a GPU.
  TILEWISE_DEVICE int32_t count_of(int32_t keys) const {
    const int32_t n = max(1, keys) - 1;
    const auto quotient = static_cast<int32_t>(static_cast<float>(n) * reciprocal_);
    const int32_t rest = n - quotient * chunk_size_;  // the quotient may be 1 less or more
    return quotient + 1 + (rest >= chunk_size_ ? 1 : 0) - (rest < 0 ? 1 : 0);
  }

  // Chunks of this lane's sequences without the first one of each.
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
  float reciprocal_;          // 1 / chunk_size_
  int32_t later_chunks_ = 0;  // later_chunks_of_lane()
};

}  // namespace tilewise::cuda
