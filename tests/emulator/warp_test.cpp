// Exchange between lanes, ldmatrix and matrix products compared with plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/half.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "emulator/grid.h"

namespace tilewise::cuda {
namespace {

using emulator::run_grid;

TEST(Warp, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> runs(3 * 64);
  run_grid(3, 64, 0, [&] {
    ASSERT_EQ(ptx::block_threads(), 64);
    ASSERT_EQ(ptx::grid_blocks(), 3);
    ++runs[ptx::block_index() * 64 + ptx::thread_index()];
  });
  EXPECT_EQ(runs, std::vector<int>(3 * 64, 1));
}

TEST(Warp, Shuffles) {
  run_grid(1, 96, 0, [] {
    const int lane = ptx::lane_index();
    const int thread = ptx::thread_index();
    for (int mask = 1; mask < 32; mask *= 2) {
      ASSERT_EQ(ptx::shuffle_xor(static_cast<float>(thread), mask),
                static_cast<float>(thread ^ mask));
    }
    for (int from = 0; from < 32; ++from) {
      ASSERT_EQ(ptx::shuffle(static_cast<uint32_t>(thread), from), thread / 32 * 32 + from);
    }
    ASSERT_EQ(ptx::shuffle(static_cast<uint32_t>(lane), 31 - lane), 31 - lane);
    ASSERT_TRUE(ptx::any(thread == 40) == (ptx::warp_index() == 1));
  });
}

// Row `row` of matrix `matrix`; columns are counted in 16-bit elements.
uint16_t pattern(int matrix, int row, int column) {
  return static_cast<uint16_t>(matrix * 64 + row * 8 + column);
}

void write_matrices(char* to) {
  const int lane = ptx::lane_index();
  for (int column = 0; column < 8; ++column) {
    ptx::st_shared_b16(ptx::shared_address(to) + lane * 16 + column * 2,
                       pattern(lane / 8, lane % 8, column));
  }
  ptx::sync_warp();
}

TEST(Warp, LoadMatrix) {
  run_grid(1, 32, 512, [] {
    char* shared = ptx::shared_memory();
    write_matrices(shared);
    const int lane = ptx::lane_index();
    uint32_t r[4];
    ptx::ldmatrix_x4(r, ptx::shared_address(shared) + lane * 16);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(r[i] & 0xffff, pattern(i, lane / 4, lane % 4 * 2));
      ASSERT_EQ(r[i] >> 16, pattern(i, lane / 4, lane % 4 * 2 + 1));
    }
  });
  EXPECT_EQ(emulator::statistics().matrix_loads, 4);
  EXPECT_EQ(emulator::statistics().matrix_load_conflicts, 0);
}

TEST(Warp, LoadMatrixTransposed) {
  run_grid(1, 32, 512, [] {
    char* shared = ptx::shared_memory();
    write_matrices(shared);
    const int lane = ptx::lane_index();
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, ptx::shared_address(shared) + lane * 16);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(r[i] & 0xffff, pattern(i, lane % 4 * 2, lane / 4));
      ASSERT_EQ(r[i] >> 16, pattern(i, lane % 4 * 2 + 1, lane / 4));
    }
  });
}

TEST(Warp, LoadMatrixConflicts) {
  // Rows 64 bytes apart: rows 0, 2, 4, 6 of a matrix share a group of banks.
  run_grid(2, 32, 32 * 64, [] {
    char* shared = ptx::shared_memory();
    const ptx::SharedAddress row = ptx::shared_address(shared) + ptx::lane_index() * 64;
    ptx::st_shared_v4_b32(row, {1, 2, 3, 4});
    ptx::sync_warp();
    uint32_t r[4];
    ptx::ldmatrix_x4(r, row);
    ptx::ldmatrix_x4(r, ptx::shared_address(shared));  // one row for all: a broadcast
  });
  EXPECT_EQ(emulator::statistics().matrix_load_conflicts, 2 * 4 * 3);
}

// stmatrix inverts ldmatrix.
TEST(Warp, StoreMatrix) {
  for (const bool transposed : {false, true}) {
    run_grid(1, 32, 1024, [transposed] {
      char* shared = ptx::shared_memory();
      write_matrices(shared);
      const ptx::SharedAddress row = ptx::shared_address(shared) + ptx::lane_index() * 16;
      uint32_t r[4];
      if (transposed) {
        ptx::ldmatrix_x4_trans(r, row);
        ptx::stmatrix_x4_trans(row + 512, r);
      } else {
        ptx::ldmatrix_x4(r, row);
        ptx::stmatrix_x4(row + 512, r);
      }
      ptx::sync_warp();
      for (int i = ptx::lane_index(); i < 128; i += 32) {
        ASSERT_EQ(ptx::ld_shared_b32(ptx::shared_address(shared) + 512 + i * 4),
                  ptx::ld_shared_b32(ptx::shared_address(shared) + i * 4));
      }
    });
  }
}

template <int kDepth>
struct Matrices {
  float a[16][kDepth], b[kDepth][8], c[16][8];
};

template <class T, int kDepth>
Matrices<kDepth> random_matrices() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return to_float(from_float<T>(normal(random))); };
  Matrices<kDepth> m;
  for (auto& row : m.a) {
    for (float& x : row) x = draw();
  }
  for (auto& row : m.b) {
    for (float& x : row) x = draw();
  }
  for (auto& row : m.c) {
    for (float& x : row) x = normal(random);
  }
  return m;
}

template <int kDepth>
void expect_product(const Matrices<kDepth>& m, const float (&d)[16][8]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      double sum = m.c[i][j];
      for (int k = 0; k < kDepth; ++k) sum += static_cast<double>(m.a[i][k]) * m.b[k][j];
      EXPECT_NEAR(d[i][j], sum, 4e-6) << i << " " << j;
    }
  }
}

template <class T>
uint32_t pair(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

template <class T, int kDepth>
void check_pairs() {
  const auto m = random_matrices<T, kDepth>();
  float d[16][8];
  run_grid(1, 32, 0, [&] {
    const int g = ptx::lane_index() / 4;
    const int t = ptx::lane_index() % 4 * 2;
    uint32_t a[4];
    uint32_t b[2];
    for (int half = 0; half < kDepth / 8; ++half) {
      const int k = half * 8 + t;
      a[half * 2] = pair<T>(m.a[g][k], m.a[g][k + 1]);
      a[half * 2 + 1] = pair<T>(m.a[g + 8][k], m.a[g + 8][k + 1]);
      b[half] = pair<T>(m.b[k][g], m.b[k + 1][g]);
    }
    float sums[4] = {m.c[g][t], m.c[g][t + 1], m.c[g + 8][t], m.c[g + 8][t + 1]};
    if constexpr (kDepth == 8) {
      ptx::mma_m16n8k8_f16(sums, a[0], a[1], b[0]);
    } else if constexpr (std::is_same_v<T, Half>) {
      ptx::mma_m16n8k16_f16(sums, a, b[0], b[1]);
    } else {
      ptx::mma_m16n8k16_bf16(sums, a, b[0], b[1]);
    }
    for (int e = 0; e < 4; ++e) d[g + e / 2 * 8][t + e % 2] = sums[e];
  });
  expect_product(m, d);
}

TEST(Warp, ProductHalf) { check_pairs<Half, 16>(); }
TEST(Warp, ProductBFloat16) { check_pairs<BFloat16, 16>(); }
TEST(Warp, ProductHalfDepth8) { check_pairs<Half, 8>(); }

float tf32(float x) { return ptx::float_of(ptx::bits_of(x) & 0xffffe000u); }

TEST(Warp, ProductTf32IgnoresLowBits) {
  auto m = random_matrices<float, 8>();
  float d[16][8];
  run_grid(1, 32, 0, [&] {
    const int g = ptx::lane_index() / 4;
    const int t = ptx::lane_index() % 4;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) a[i] = ptx::bits_of(m.a[g + i % 2 * 8][t + i / 2 * 4]);
    float sums[4];
    for (int e = 0; e < 4; ++e) sums[e] = m.c[g + e / 2 * 8][2 * t + e % 2];
    ptx::mma_m16n8k8_tf32(sums, a, ptx::bits_of(m.b[t][g]), ptx::bits_of(m.b[t + 4][g]));
    for (int e = 0; e < 4; ++e) d[g + e / 2 * 8][2 * t + e % 2] = sums[e];
  });
  for (auto& row : m.a) {
    for (float& x : row) x = tf32(x);
  }
  for (auto& row : m.b) {
    for (float& x : row) x = tf32(x);
  }
  expect_product(m, d);
}

TEST(Warp, Conversions) {
  EXPECT_EQ(ptx::cvt_f16x2(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(ptx::cvt_bf16x2(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(ptx::cvt_bf16x2(1.00390625f, 1.01171875f), 0x3f823f80u);  // ties to even
  EXPECT_EQ(ptx::ex2(3.0f), 8.0f);
  EXPECT_EQ(ptx::ex2(-127.0f), 0.0f);
  EXPECT_EQ(ptx::ex2(-HUGE_VALF), 0.0f);
  EXPECT_EQ(ptx::lg2(1e-40f), -HUGE_VALF);
  EXPECT_EQ(ptx::lg2(0.25f), -2.0f);
  EXPECT_EQ(ptx::rcp_approximate(-0x1p126f), -0x1p-126f);
  EXPECT_EQ(ptx::rcp_approximate(0x1.8p126f), 0.0f);
  EXPECT_EQ(ptx::rcp_approximate(1e-40f), HUGE_VALF);
  EXPECT_TRUE(std::isnan(ptx::ex2(std::nanf(""))));
}

}  // namespace
}  // namespace tilewise::cuda
