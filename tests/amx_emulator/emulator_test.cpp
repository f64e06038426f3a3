// The emulated instructions, compared with their description in Intel's manual.
#include <gtest/gtest.h>

#include "cpu/generic/amx_gemm.h"

namespace tilewise::cpu {
namespace {

uint32_t pair_of(float even, float odd) {
  return from_float<BFloat16>(even).bits | static_cast<uint32_t>(from_float<BFloat16>(odd).bits)
                                               << 16;
}

struct TileTest : testing::Test {
  alignas(64) float c[16][16] = {};
  alignas(64) uint32_t a[16][16] = {};
  alignas(64) uint32_t b[16][16] = {};

  void multiply() {
    const TileSession session;
    tile_load<0>(c, 64);
    tile_load<4>(a, 64);
    tile_load<6>(b, 64);
    tile_dot_bf16<0, 4, 6>();
    tile_store<0>(c, 64);
  }
};

TEST_F(TileTest, EveryRowMeetsEveryLane) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      c[i][j] = static_cast<float>(1000 * i + j);
      a[i][j] = pair_of(static_cast<float>(i), static_cast<float>(j));
      b[i][j] = pair_of(static_cast<float>(j - i), 2.0f);
    }
  multiply();
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      float sum = static_cast<float>(1000 * i + j);
      for (int u = 0; u < 16; ++u) sum += static_cast<float>(i * (j - u) + 2 * u);
      EXPECT_EQ(c[i][j], sum) << i << " " << j;
    }
}

TEST_F(TileTest, EvenAndOddProductsAreSummedApart) {
  // Summed in order, 2^24 + 1 + 1 is 2^24; summed separately, the ones first make 2.
  a[0][0] = pair_of(16777216.0f, 1.0f);
  a[0][1] = pair_of(0.0f, 1.0f);
  b[0][0] = b[1][0] = pair_of(1.0f, 1.0f);
  multiply();
  EXPECT_EQ(c[0][0], 16777218.0f);
}

TEST_F(TileTest, ProductsAreSummedBeforeTheyMeetC) {
  c[0][0] = 16777216.0f;
  a[0][0] = a[0][1] = pair_of(1.0f, 0.0f);
  b[0][0] = b[1][0] = pair_of(1.0f, 0.0f);
  multiply();
  EXPECT_EQ(c[0][0], 16777218.0f);
}

TEST_F(TileTest, DenormalsAreZero) {
  c[0][0] = 1e-39f;                    // as a sum
  a[1][0] = pair_of(0x1p-130f, 0.0f);  // as an operand
  b[0][1] = pair_of(0x1p+100f, 0.0f);
  a[2][0] = pair_of(0x1p-100f, 0.0f);  // as a product
  b[0][2] = pair_of(-0x1p-30f, 0.0f);
  multiply();
  EXPECT_EQ(c[0][0], 0.0f);
  EXPECT_EQ(c[1][1], 0.0f);
  EXPECT_EQ(c[2][2], 0.0f);
}

TEST_F(TileTest, InfinityAndNan) {
  a[0][0] = pair_of(INFINITY, 0.0f);
  b[0][0] = pair_of(-1.0f, 0.0f);
  a[1][0] = pair_of(NAN, 0.0f);
  multiply();
  EXPECT_EQ(c[0][0], -INFINITY);
  EXPECT_TRUE(std::isnan(c[0][1])) << "inf * 0";
  EXPECT_TRUE(std::isnan(c[1][0]));
  EXPECT_EQ(c[2][0], 0.0f);
}

TEST(Tile, FaultsWithoutConfiguration) {
  alignas(64) float memory[16][16] = {};
  EXPECT_DEATH(tile_load<0>(memory, 64), "without a configuration");
  {
    const TileSession session;
  }
  EXPECT_DEATH(tile_zero<0>(), "without a configuration");
}

TEST(Tile, FaultsOnBadConfigurations) {
  TileConfig config = kTileConfig;
  config.palette = 2;
  EXPECT_DEATH(tile_configure(config), "palette");
  config = kTileConfig;
  config.rows[8] = 16;
  EXPECT_DEATH(tile_configure(config), "reserved");
  config = kTileConfig;
  config.row_bytes[3] = 128;
  EXPECT_DEATH(tile_configure(config), "larger");
}

TEST(Tile, StridesAreBytesAndRowsStayApart) {
  alignas(64) float memory[16][32];
  for (auto& row : memory)
    for (float& x : row) x = 7.0f;
  const TileSession session;
  tile_zero<3>();
  tile_store<3>(memory, sizeof(memory[0]));
  for (const auto& row : memory)
    for (int i = 0; i < 32; ++i) EXPECT_EQ(row[i], i < 16 ? 0.0f : 7.0f);
}

}  // namespace
}  // namespace tilewise::cpu
