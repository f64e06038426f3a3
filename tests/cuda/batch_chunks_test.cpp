// The chunks that warps find from the lengths of a batch, compared with a sequential computation.
#include "cuda/common/batch_chunks.h"
#include "cuda/common/longest_first.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "call.h"
#include "emulator/grid.h"

namespace {

using tilewise::ChunkSchedule;
using tilewise::cuda::BatchChunks;
using tilewise::cuda::ForwardParams;
using tilewise::cuda::KeyChunk;
using tilewise::cuda::LongestFirst;

struct Batch {
  std::vector<int32_t> lengths, paddings, keys;
  ForwardParams p{};

  Batch(int64_t batch, int64_t longest, int32_t max_chunks) {
    cuda_test::Random random{std::mt19937(static_cast<uint32_t>(batch + max_chunks))};
    for (int64_t i = 0; i < batch; ++i) {
      lengths.push_back(static_cast<int32_t>(random.rarely() ? 0 : random.between(0, longest)));
      paddings.push_back(static_cast<int32_t>(random.between(0, 100)));
    }
    const bool padded = random.coin();
    for (size_t i = 0; i < lengths.size(); ++i)
      keys.push_back(std::max(0, lengths[i] - (padded ? paddings[i] : 0)));
    p.problem.batch = batch;
    p.problem.seqused_k = lengths.data();
    if (padded) p.problem.leftpad_k = paddings.data();
    p.chunks = {max_chunks, 1, 64};
  }

  // The chunk size, computed sequentially.
  int32_t chunk_size() const {
    const auto count = [&](int32_t size) {
      int32_t sum = 0;
      for (const int32_t length : keys) sum += ChunkSchedule::count(length, size);
      return sum;
    };
    const ChunkSchedule::Batch batch = {static_cast<int32_t>(keys.size()),
                                        std::accumulate(keys.begin(), keys.end(), 0),
                                        *std::max_element(keys.begin(), keys.end())};
    int32_t chunk_size = p.chunks.first_chunk_size(batch);
    for (int iteration = 0; count(chunk_size) > p.chunks.max_chunks; ++iteration)
      chunk_size = p.chunks.next_chunk_size(batch, iteration, chunk_size, count(chunk_size));
    return chunk_size;
  }
};

// First come the first chunks of all sequences, then the other chunks. CTAs with larger numbers
// find no chunk.
TEST(BatchChunks, EveryWarpFindsTheChunksOfAllLengths) {
  for (const int32_t batch : {1, 2, 31, 32, 33, 127, 128, 129, 300}) {
    for (const int32_t max_chunks : {batch, batch + 2, 4 * batch}) {
      const Batch b(batch, 100000, max_chunks);
      const int32_t chunk_size = b.chunk_size();
      tilewise::cuda::emulator::run_grid(1, 64, 0, [&] {
        BatchChunks chunks(b.p);
        int32_t next = batch;
        for (int32_t sequence = 0; sequence < batch; ++sequence) {
          const int32_t count =
              ChunkSchedule::count(b.keys[static_cast<size_t>(sequence)], chunk_size);
          for (const int32_t split : {0, std::min(1, count - 1), count - 1}) {
            const KeyChunk found = chunks.find(split == 0 ? sequence : next + split - 1);
            ASSERT_EQ(found.sequence, sequence);
            ASSERT_EQ(found.split, split);
            ASSERT_EQ(found.splits, count);
          }
          next += count - 1;
        }
        ASSERT_LE(next, b.p.chunks.max_chunks);
        ASSERT_EQ(chunks.find(next).sequence, -1);
        ASSERT_EQ(chunks.find(next + 1000).sequence, -1);
      });
    }
  }
}

// Every sequence occurs once. Those with more keys than the mean come first, unless the mean is
// less than a few key tiles.
TEST(LongestFirst, EveryWarpFindsTheSequenceAtAPosition) {
  for (const int32_t batch : {1, 2, 31, 32, 33, 127, 128, 129, 300}) {
    for (const int64_t longest : {0, 1, 400, 600, 2000, 100000}) {
      const Batch b(batch, longest, batch);
      const int64_t keys = std::accumulate(b.keys.begin(), b.keys.end(), int64_t{0});
      std::vector<int32_t> expected(b.keys.size());
      std::iota(expected.begin(), expected.end(), 0);
      if (keys >= int64_t{batch} * LongestFirst::kShort * b.p.chunks.tile)
        std::stable_partition(expected.begin(), expected.end(), [&](int32_t i) {
          return int64_t{b.keys[static_cast<size_t>(i)]} * batch > keys;
        });
      tilewise::cuda::emulator::run_grid(1, 32, 0, [&] {
        const LongestFirst order(b.p);
        for (int32_t n = 0; n < batch; ++n)
          ASSERT_EQ(order.at(n), expected[static_cast<size_t>(n)]) << batch << ' ' << longest;
      });
    }
  }
}

}  // namespace
