// Philox and the dropout decision: published vectors, and dependence on position alone.
#include "attention/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

namespace {

using tilewise::Dropout;
using tilewise::PhiloxState;

using Words = std::array<uint32_t, 4>;

template <int kRounds>
Words philox(Words counter, uint32_t k0, uint32_t k1) {
  const PhiloxState<uint32_t> out = tilewise::philox4x32<tilewise::ScalarMath, kRounds>(
      PhiloxState<uint32_t>{counter[0], counter[1], counter[2], counter[3]}, k0, k1);
  return {out.c0, out.c1, out.c2, out.c3};
}

// The known-answer vectors published with the generator.
TEST(Philox, KnownAnswers) {
  const uint32_t ones = 0xffffffff;
  const Words pi = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  EXPECT_EQ(philox<10>({0, 0, 0, 0}, 0, 0),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox<10>({ones, ones, ones, ones}, ones, ones),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox<10>(pi, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  EXPECT_EQ(philox<7>({0, 0, 0, 0}, 0, 0), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox<7>({ones, ones, ones, ones}, ones, ones),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox<7>(pi, 0xa4093822, 0x299f31d0),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

// The layout that the header documents: counter, key and order of the bits.
TEST(Dropout, DecisionFollowsTheDocumentedLayout) {
  const uint64_t seed = 0x0123456789abcdef;
  const uint64_t offset = 0xfedcba9876543210;
  const float p = 0.3f;
  const Dropout dropout = Dropout::make(p, seed, offset);
  const auto threshold = static_cast<uint32_t>(std::lround(static_cast<double>(p) * 65536));
  for (int64_t batch_head : {0, 1, 77})
    for (int64_t row : {0, 3, 100000})
      for (int64_t key = 0; key < 80; ++key) {
        const Words words = philox<7>({static_cast<uint32_t>(key / 16), static_cast<uint32_t>(row),
                                       static_cast<uint32_t>(batch_head), 0x76543210},
                                      0x89abcdef, 0x01234567u ^ 0xfedcba98u);
        const auto j = static_cast<uint32_t>(key % 16);
        uint32_t number = 0;
        for (uint32_t i = 0; i < 8; ++i) {
          const uint32_t half = words[i / 2] >> (16 * (i % 2));
          number |= (half >> j & 1u) << (8 + i) | (half >> (j ^ 8u) & 1u) << i;
        }
        EXPECT_EQ(dropout.kept(batch_head, row, key), number >= threshold);
      }
}

TEST(Dropout, TwoBlocksAtOnceEqualEachAlone) {
  for (float p : {1e-5f, 0.1f, 0.5f, 0.99999f}) {
    const Dropout dropout = Dropout::make(p, 42, 7);
    const auto at = [&](uint32_t block, uint32_t row) { return dropout.counter(block, row, 3u); };
    const auto one = [&](uint32_t block, uint32_t row) {
      return dropout.kept_keys<tilewise::ScalarMath>(at(block, row));
    };
    EXPECT_EQ(dropout.kept_keys<tilewise::ScalarMath>(at(5, 9), at(2, 8)), one(5, 9) | one(2, 8)
                                                                                           << 16);
  }
}

TEST(Dropout, ShardsDecideLikeTheWhole) {
  const Dropout whole = Dropout::make(0.4f, 42, 7);
  for (int64_t row : {0, 1, 100})
    for (int64_t key : {0, 16, 32, 1, 15, 17, 1000003}) {
      const Dropout shard = whole.from(row, key);
      for (int64_t i = 0; i < 3; ++i)
        for (int64_t j = 0; j < 70; ++j)
          EXPECT_EQ(shard.kept(3, i, j), whole.kept(3, row + i, key + j)) << row << ' ' << key;
      const auto counter = [&](uint32_t block) { return shard.counter(block, 1u, 3u); };
      const auto one = [&](uint32_t block) {
        return shard.kept_keys<tilewise::ScalarMath>(counter(block));
      };
      EXPECT_EQ(shard.kept_keys<tilewise::ScalarMath>(counter(5), counter(2)), one(5) | one(2)
                                                                                            << 16);
    }
}

TEST(Dropout, ExtremeProbabilities) {
  const Dropout all = Dropout::make(0.999999f, 42, 7);  // its threshold is 2^16
  const Dropout few = Dropout::make(1e-5f, 42, 7);      // its threshold is 1
  int dropped = 0;
  for (int64_t row = 0; row < 100; ++row)
    for (int64_t key = 0; key < 100; ++key) {
      EXPECT_FALSE(all.kept(3, row, key));
      dropped += !few.kept(3, row, key);
    }
  EXPECT_LE(dropped, 3);  // 10000 decisions with probability 1 in 65536
}

TEST(Dropout, KeptFractionMatchesProbability) {
  for (float p : {0.1f, 0.5f, 0.9f}) {
    const Dropout dropout = Dropout::make(p, 42, 7);
    int kept = 0;
    for (int64_t row = 0; row < 200; ++row)
      for (int64_t key = 0; key < 200; ++key) kept += dropout.kept(3, row, key);
    // 40000 decisions have a standard deviation of at most 0.0025.
    EXPECT_NEAR(kept / 40000.0, 1.0 - static_cast<double>(p), 0.0125);
    EXPECT_FLOAT_EQ(dropout.keep_scale, static_cast<float>(1.0 / (1.0 - static_cast<double>(p))));
  }
}

TEST(Dropout, ZeroIsOff) {
  EXPECT_FALSE(Dropout::make(0.0f, 1, 2).on());
  EXPECT_TRUE(Dropout::make(0.1f, 1, 2).on());
  EXPECT_EQ(Dropout::make(0.0f, 1, 2).keep_scale, 1.0f);
}

TEST(Dropout, EveryCoordinateMatters) {
  const Dropout dropout = Dropout::make(0.5f, 42, 7);
  const auto differing = [&](const Dropout& other, int64_t batch_head, int64_t row) {
    int count = 0;
    for (int64_t key = 0; key < 4000; ++key)
      count += dropout.kept(3, 5, key) != other.kept(batch_head, row, key);
    return count;
  };
  EXPECT_EQ(differing(dropout, 3, 5), 0);
  for (int count :
       {differing(dropout, 4, 5), differing(dropout, 3, 6),
        differing(Dropout::make(0.5f, 43, 7), 3, 5), differing(Dropout::make(0.5f, 42, 8), 3, 5),
        differing(Dropout::make(0.5f, 42 + (1ull << 32), 7), 3, 5),
        differing(Dropout::make(0.5f, 42, 7 + (1ull << 32)), 3, 5)}) {
    EXPECT_NEAR(count, 2000, 200);  // the standard deviation is 32
  }
}

}  // namespace
