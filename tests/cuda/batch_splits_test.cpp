// The parts that warps find from the lengths of a batch, against those of their sum.
#include "cuda/common/batch_splits.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "call.h"
#include "emulator/grid.h"

namespace {

using tilewise::Problem;
using tilewise::SplitRule;
using tilewise::cuda::BatchSplits;

std::vector<int32_t> lengths_of(cuda_test::Random& random, int64_t batch, int64_t most) {
  std::vector<int32_t> lengths;
  for (int64_t i = 0; i < batch; ++i)
    lengths.push_back(static_cast<int32_t>(random.rarely() ? 0 : random.between(0, most)));
  return lengths;
}

TEST(BatchSplits, EveryWarpFindsTheSameOfAllLengths) {
  for (const int64_t batch : {1, 2, 31, 32, 33, 127, 128, 129, 300, 1000}) {
    cuda_test::Random random{std::mt19937(static_cast<uint32_t>(batch))};
    const std::vector<int32_t> lengths = lengths_of(random, batch, 100000);
    Problem p{};
    p.batch = batch;
    p.seqused_k = lengths.data();
    SplitRule rule{64, 128};
    rule.shares = static_cast<int32_t>(batch * 3);
    rule.tile = 64;
    const int64_t all = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    tilewise::cuda::emulator::run_grid(2, 96, 0, [&] {
      BatchSplits splits(p, rule);
      ASSERT_TRUE(splits.any());
      const int32_t keys = lengths.back();
      ASSERT_EQ(splits.of(rule, keys), rule.parts_of_shares(keys, static_cast<int32_t>(all)));
    });
  }
}

// A sum that does not fit into 32 bits is one that does, the same in all blocks.
TEST(BatchSplits, NoSumCutsBelowTheFloor) {
  const std::vector<int32_t> lengths(9, INT32_MAX);
  Problem p{};
  p.batch = static_cast<int64_t>(lengths.size());
  p.seqused_k = lengths.data();
  SplitRule rule{1 << 27, 128};
  rule.shares = static_cast<int32_t>(p.batch);
  rule.tile = 64;
  tilewise::cuda::emulator::run_grid(1, 32, 0, [&] {
    ASSERT_LE(BatchSplits(p, rule).of(rule, INT32_MAX), rule.parts_of_shares(INT32_MAX, 0));
  });
}

TEST(BatchSplits, ReadsNothingForOtherRules) {
  Problem p{};
  p.batch = 5;  // and no lengths
  const SplitRule rule{64, 128};
  tilewise::cuda::emulator::run_grid(1, 32, 0, [&] { ASSERT_FALSE(BatchSplits(p, rule).any()); });
}

}  // namespace
