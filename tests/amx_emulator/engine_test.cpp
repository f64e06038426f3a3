// The tile engine compared with double precision: every block shape, both kinds of operands.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/generic/engine_amx.h"

namespace tilewise::cpu {
namespace {

struct GemmCase {
  int64_t m;
  int64_t vectors;
  int64_t units;
};

// Operands whose rows have gaps filled with NaN, which would show a read of a gap.
template <int kParts>
struct Gemm {
  GemmCase size;
  int64_t lda, ldb, ldc;
  std::vector<uint32_t> a, b;
  std::vector<float> c;
  std::vector<double> want, magnitude;
  std::mt19937 random{7};

  explicit Gemm(GemmCase s)
      : size(s),
        lda(s.units + 16),
        ldb(s.vectors * W + 16),
        ldc(s.vectors * W + 16),
        a(static_cast<size_t>(kParts * s.m * lda), 0xffffffffu),
        b(static_cast<size_t>(kParts * s.units * ldb), 0xffffffffu),
        c(static_cast<size_t>(s.m * ldc)),
        want(c.size()),
        magnitude(c.size()) {
    const int64_t lanes = s.vectors * W;
    std::vector<double> x(static_cast<size_t>(s.m * s.units * 2));
    std::vector<double> y(static_cast<size_t>(s.units * lanes * 2));
    fill(x, a, s.m, s.units, lda);
    fill(y, b, s.units, lanes, ldb);
    std::normal_distribution<float> normal;
    for (float& value : c) value = normal(random);
    for (int64_t i = 0; i < s.m; ++i)
      for (int64_t j = 0; j < lanes; ++j)
        for (int64_t u = 0; u < 2 * s.units; ++u) {
          const double product = x[static_cast<size_t>(i * s.units * 2 + u)] *
                                 y[static_cast<size_t>((u / 2 * lanes + j) * 2 + u % 2)];
          want[static_cast<size_t>(i * ldc + j)] += product;
          magnitude[static_cast<size_t>(i * ldc + j)] += std::abs(product);
        }
  }

  void fill(std::vector<double>& values, std::vector<uint32_t>& units, int64_t rows,
            int64_t columns, int64_t ld) {
    std::normal_distribution<float> normal;
    const size_t plane = units.size() / kParts;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        uint32_t parts[2] = {};
        for (int k = 0; k < 2; ++k) {
          float rest = normal(random);
          double sum = 0.0;
          for (int part = 0; part < kParts; ++part) {
            const BFloat16 rounded = from_float<BFloat16>(rest);
            rest -= to_float(rounded);
            sum += static_cast<double>(to_float(rounded));
            parts[part] |= static_cast<uint32_t>(rounded.bits) << (16 * k);
          }
          values[static_cast<size_t>((i * columns + j) * 2 + k)] = sum;
        }
        for (int part = 0; part < kParts; ++part)
          units[static_cast<size_t>(i * ld + j) + static_cast<size_t>(part) * plane] = parts[part];
      }
  }

  void check(bool accumulate) {
    const std::vector<float> before = c;
    const int64_t plane_a = static_cast<int64_t>(a.size()) / kParts;
    const int64_t plane_b = static_cast<int64_t>(b.size()) / kParts;
    {
      const TileSession session;
      tile_gemm<kParts>(c.data(), ldc, accumulate, {a.data(), lda, 1, plane_a}, size.m,
                        {b.data(), ldb, plane_b}, size.vectors, size.units);
    }
    // The rounding of fp32 sums of up to 160 products and, for two parts, the omitted product low x
    // low.
    for (size_t i = 0; i < c.size(); ++i) {
      const double start = static_cast<double>(before[i]);
      if (static_cast<int64_t>(i) % ldc >= size.vectors * W) {
        ASSERT_EQ(c[i], before[i]) << "outside, at " << i;
        continue;
      }
      const double expected = want[i] + (accumulate ? start : 0.0);
      const double bound = 4e-6 * (magnitude[i] + std::abs(start));
      ASSERT_NEAR(static_cast<double>(c[i]), expected, bound) << "at " << i;
    }
  }
};

struct GemmTest : testing::TestWithParam<GemmCase> {};

TEST_P(GemmTest, Bf16) {
  Gemm<1> gemm(GetParam());
  gemm.check(false);
  gemm.check(true);
}

TEST_P(GemmTest, SumsOfTwoBf16) {
  Gemm<2> gemm(GetParam());
  gemm.check(false);
  gemm.check(true);
}

std::vector<GemmCase> gemm_cases() {
  std::vector<GemmCase> cases;
  for (int64_t m : {32, 96})
    for (int64_t vectors : {1, 2, 3, 4, 5})
      for (int64_t units : {16, 32, 48, 80}) cases.push_back({m, vectors, units});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Blocks, GemmTest, testing::ValuesIn(gemm_cases()));

float part(U units, int lane, bool odd) {
  const uint32_t unit = units[lane];
  return to_float(BFloat16{static_cast<uint16_t>(odd ? unit >> 16 : unit)});
}

TEST(Split, EveryFiniteFp16IsExact) {
  for (uint32_t bits = 0; bits < 0x10000; bits += W) {
    Half x[W];
    for (int i = 0; i < W; ++i) x[i] = {static_cast<uint16_t>(bits + i)};
    if ((x[0].bits & 0x7c00) == 0x7c00) continue;
    const SplitPairs parts = SplitPairs::of(to_fp32(x), -to_fp32(x));
    for (int i = 0; i < W; ++i) {
      EXPECT_EQ(part(parts.high, i, false) + part(parts.low, i, false), to_float(x[i]));
      EXPECT_EQ(part(parts.high, i, true) + part(parts.low, i, true), -to_float(x[i]));
    }
  }
}

TEST(Split, KeepsSixteenBitsOfAnyFp32) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 1000; ++round) {
    F x;
    for (int i = 0; i < W; ++i) x[i] = std::ldexp(normal(random), round % 60 - 30);
    const SplitPairs parts = SplitPairs::of(x, x);
    for (int i = 0; i < W; ++i)
      EXPECT_LE(std::abs(part(parts.high, i, false) + part(parts.low, i, false) - x[i]),
                0x1p-16f * std::abs(x[i]));
  }
}

// One product of two fp32 numbers in parts, as the tiles compute it, with x in A and y in B.
float product(float x, float y) {
  alignas(64) uint32_t a[2][32][16] = {};
  alignas(64) uint32_t b[2][16][16] = {};
  alignas(64) float c[32][16];
  const SplitPairs in_a = SplitPairs::of(splat(x), F{});
  const SplitPairs in_b = SplitPairs::of(splat(y), F{});
  a[0][0][0] = in_a.high[0];
  a[1][0][0] = in_a.low[0];
  b[0][0][0] = in_b.high[0];
  b[1][0][0] = in_b.low[0];
  const TileSession session;
  tile_gemm<2>(&c[0][0], 16, false, {&a[0][0][0], 16, 1, 32 * 16}, 32, {&b[0][0][0], 16, 16 * 16},
               1, 16);
  return c[0][0];
}

TEST(Split, ProductsOfInfinitiesAndNanFollowIeee) {
  const float values[] = {0.0f,     -0.0f,     1.0f, -3.0f,    0.0999755859375f, -65504.0f,
                          INFINITY, -INFINITY, NAN,  5.96e-8f, 256.0f,           -1e-3f};
  for (float x : values)
    for (float y : values) {
      const float got = product(x, y);
      const float want = x * y;
      if (std::isnan(want))
        EXPECT_TRUE(std::isnan(got)) << x << " * " << y << " = " << got;
      else if (std::isinf(want))
        EXPECT_EQ(got, want) << x << " * " << y;
      else
        EXPECT_NEAR(got, want, 0x1p-16f * std::abs(want)) << x << " * " << y;
    }
}

TEST(Split, WeightsReadBackAsTheyWereStored) {
  using E = AmxSplitEngine<Isa::amx>;
  constexpr int64_t kLd = 32;
  uint32_t units[2 * kLd * 8] = {};
  constexpr int64_t kPlane = kLd * 8;
  F even, odd;
  for (int i = 0; i < W; ++i) {
    even[i] = std::exp2(static_cast<float>(-i) / 3.0f);
    odd[i] = i == 5 ? INFINITY : -even[i];
  }
  E::store_weights_b(units, kPlane, kLd, 2, W, even, odd);
  for (int i = 0; i < W; ++i) {
    EXPECT_NEAR(E::weight_b(units, kPlane, kLd, 2, W + i), even[i], 0x1p-16f * even[i]);
    const float other = E::weight_b(units, kPlane, kLd, 3, W + i);
    if (i == 5)
      EXPECT_EQ(other, INFINITY);
    else
      EXPECT_NEAR(other, odd[i], 0x1p-16f * even[i]);
  }
  E::store_weights_a(units, kPlane, kLd, 1, W, odd);
  for (int i = 0; i < W; ++i) {
    const float got = E::weight_a(units, kPlane, kLd, 1, W + i);
    if (i == 5)
      EXPECT_EQ(got, INFINITY);
    else
      EXPECT_NEAR(got, odd[i], 0x1p-16f * even[i]);
  }
}

}  // namespace
}  // namespace tilewise::cpu
