// Merging partial softmax states, and the addresses of keys.
#include "attention/online_softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/kv_source.h"

namespace {

using tilewise::KvSource;
using tilewise::LogSum;
using tilewise::Merge;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct State {
  double out;
  float lse;
};

// softmax(scores) . values over [begin, end), in double.
State exact(const std::vector<double>& scores, const std::vector<double>& values, size_t begin,
            size_t end) {
  double top = -kInfinity;
  for (size_t j = begin; j < end; ++j) top = std::max(top, scores[j]);
  if (std::isinf(top)) return {0.0, -kInfinity};
  double sum = 0;
  double out = 0;
  for (size_t j = begin; j < end; ++j) {
    const double p = std::exp(scores[j] - top);
    sum += p;
    out += p * values[j];
  }
  return {out / sum, static_cast<float>(top + std::log(sum))};
}

State merge(State a, State b) {
  const Merge m = Merge::of({a.lse}, {b.lse});
  return {static_cast<double>(m.weight_a) * a.out + static_cast<double>(m.weight_b) * b.out,
          m.sum.lse};
}

TEST(Merge, RandomPartitionsGiveTheWhole) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (int round = 0; round < 300; ++round) {
    const size_t keys = 1 + random() % 60;
    std::vector<double> scores(keys);
    std::vector<double> values(keys);
    for (size_t j = 0; j < keys; ++j) {
      scores[j] = random() % 8 == 0 ? -static_cast<double>(kInfinity) : 10 * normal(random);
      values[j] = normal(random);
    }
    std::vector<size_t> cuts{0, keys};
    for (int c = 0; c < 5; ++c) cuts.push_back(random() % (keys + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<State> parts;
    for (size_t c = 0; c + 1 < cuts.size(); ++c)  // equal cuts: an empty range
      parts.push_back(exact(scores, values, cuts[c], cuts[c + 1]));
    std::shuffle(parts.begin(), parts.end(), random);
    State whole{0.0, -kInfinity};
    for (const State& part : parts) whole = merge(whole, part);
    const State expected = exact(scores, values, 0, keys);
    if (std::isinf(expected.lse)) {
      EXPECT_EQ(whole.lse, -kInfinity);
      EXPECT_EQ(whole.out, 0.0);
    } else {
      EXPECT_NEAR(whole.lse, expected.lse, 4e-6 * std::max(1.0f, std::abs(expected.lse)));
      EXPECT_NEAR(whole.out, expected.out, 2e-6 * std::max(1.0, std::abs(expected.out)) * 5);
    }
  }
}

TEST(Merge, EmptySidesAndExtremes) {
  const Merge none = Merge::of({-kInfinity}, {-kInfinity});
  EXPECT_EQ(none.weight_a, 0.0f);
  EXPECT_EQ(none.weight_b, 0.0f);
  EXPECT_EQ(none.sum.lse, -kInfinity);
  const Merge left = Merge::of({3.0f}, {-kInfinity});
  EXPECT_EQ(left.weight_a, 1.0f);
  EXPECT_EQ(left.weight_b, 0.0f);
  EXPECT_EQ(left.sum.lse, 3.0f);
  const Merge huge = Merge::of({1e30f}, {-1e30f});
  EXPECT_EQ(huge.weight_a, 1.0f);
  EXPECT_EQ(huge.weight_b, 0.0f);
  EXPECT_EQ(huge.sum.lse, 1e30f);
  const Merge equal = Merge::of({-200.0f}, {-200.0f});
  EXPECT_EQ(equal.weight_a, 0.5f);
  EXPECT_FLOAT_EQ(equal.sum.lse, -200.0f + std::log(2.0f));
}

// A sink of +inf has all the weight; two of them have half each.
TEST(Merge, InfiniteSideTakesAllTheWeight) {
  for (const float other : {-kInfinity, -3.0f, 1e30f}) {
    const Merge m = Merge::of({other}, {kInfinity});
    EXPECT_EQ(m.weight_a, 0.0f);
    EXPECT_EQ(m.weight_b, 1.0f);
    EXPECT_EQ(m.sum.lse, kInfinity);
  }
  const Merge both = Merge::of({kInfinity}, {kInfinity});
  EXPECT_EQ(both.weight_a, 0.5f);
  EXPECT_EQ(both.sum.lse, kInfinity);
}

// Beside a huge m, fp32 loses log l: the low half keeps it.
TEST(LogSum, LowHalfIsTheRoundingError) {
  for (const float m : {0.0f, -3.25f, 1e4f, 12345.678f, -1e9f, 1e10f, -1e30f, 3.4e38f, -3.4e38f}) {
    for (const float log_l : {0.0f, 1e-6f, 0.6931472f, 5.7f}) {
      const LogSum sum = LogSum::of(m, log_l);
      EXPECT_EQ(sum.lse, m + log_l);
      const double left = (static_cast<double>(sum.lse) - m) + static_cast<double>(sum.low);
      EXPECT_NEAR(left, log_l, 1e-6 * log_l) << m;
    }
  }
  EXPECT_EQ(LogSum::of(1.0f, kInfinity).low, 0.0f);
  EXPECT_EQ(LogSum::of(-kInfinity, 0.0f).low, 0.0f);
  EXPECT_EQ(LogSum{}.lse, -kInfinity);
}

// 200 keys of one score and 100 of the same score weigh two to one, for any score and in any order.
TEST(Merge, CountsOfEqualHugeScoresAreKept) {
  for (const float m : {-1e9f, -1e10f, 1e10f, -3.4028235e38f, 3.4028235e38f, 16777216.0f}) {
    const LogSum many = LogSum::of(m, std::log(200.0f));
    const LogSum few = LogSum::of(m, std::log(100.0f));
    for (const bool swapped : {false, true}) {
      const Merge whole = swapped ? Merge::of(few, many) : Merge::of(many, few);
      EXPECT_NEAR(swapped ? whole.weight_b : whole.weight_a, 2.0f / 3, 1e-6f) << m;
      EXPECT_NEAR(swapped ? whole.weight_a : whole.weight_b, 1.0f / 3, 1e-6f) << m;
      EXPECT_NEAR((whole.sum.lse - m) + whole.sum.low, std::log(300.0f), 2e-6f) << m;
      const Merge all = Merge::of(whole.sum, LogSum::of(m, std::log(700.0f)));
      EXPECT_NEAR(all.weight_b, 0.7f, 1e-6f) << m;
      EXPECT_NEAR((all.sum.lse - m) + all.sum.low, std::log(1000.0f), 2e-6f) << m;
    }
    EXPECT_EQ(Merge::of(many, {}).weight_a, 1.0f);
    EXPECT_EQ(Merge::of({}, many).weight_b, 1.0f);
  }
}

TEST(Merge, NanIsNotLost) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Merge m : {Merge::of({nan}, {1.0f}), Merge::of({1.0f}, {nan}),
                        Merge::of({nan}, {-kInfinity}), Merge::of({-kInfinity}, {nan})}) {
    EXPECT_TRUE(std::isnan(m.sum.lse));
  }
}

TEST(KvSource, StridedPagedAndPadded) {
  const tilewise_tensor view{nullptr, 1000, 10, 3};
  const KvSource strided{nullptr, 0, 2, 5};
  EXPECT_EQ(strided.offset(view, 0), 2050);
  EXPECT_EQ(strided.offset(view, 7), 2120);
  EXPECT_EQ(strided.run(3, 50), 47);

  const int32_t pages[] = {4, 0, 9};
  for (int64_t first : {0, 1, 4}) {
    const KvSource paged{pages, 3, 0, first, 9};
    for (int64_t j = 0; first + j < 9; ++j) {
      const int64_t row = first + j;
      EXPECT_EQ(paged.offset(view, j), pages[row / 3] * 1000 + row % 3 * 10);
      const int64_t run = paged.run(j, 9 - first);
      EXPECT_GE(run, 1);
      for (int64_t r = 1; r < run; ++r)
        EXPECT_EQ(paged.offset(view, j + r), paged.offset(view, j) + r * 10);
      EXPECT_TRUE(j + run == 9 - first || (row + run) % 3 == 0) << "the run could be longer";
    }
    const KvSource gradients = paged.dense(6);
    EXPECT_EQ(gradients.offset(view, 2), 6000 + (first + 2) * 10);
  }
  const KvSource clamped{pages, 3, 0, 0, 5};
  EXPECT_EQ(clamped.offset(view, 6), 5000) << "an entry beyond the last page";
  const int32_t negative[] = {-1};
  EXPECT_EQ((KvSource{negative, 3, 0, 0, 5}.offset(view, 0)), 5000);
}

TEST(KvSource, OffsetsBeyondTwoToThe31) {
  const tilewise_tensor view{nullptr, int64_t{1} << 40, int64_t{1} << 33, 1};
  const KvSource strided{nullptr, 0, 3, 0};
  EXPECT_EQ(strided.offset(view, 5), (int64_t{3} << 40) + (int64_t{5} << 33));
}

}  // namespace
