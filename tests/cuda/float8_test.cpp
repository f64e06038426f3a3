// The conversion of float8_e4m3 numbers to fp16 operands: every code is exact, and products agree
// with plain loops.
#include <gtest/gtest.h>

#include <cmath>

#include "base/float8.h"
#include "cuda/arch/tables.h"
#include "cuda/ptx/block.h"
#include "cuda/tile/float8.h"
#include "emulator/grid.h"

namespace tilewise::cuda {
namespace {

using arch::Sm90;
using emulator::run_grid;

float low_half(uint32_t pair) { return to_float(Half{static_cast<uint16_t>(pair)}); }
float high_half(uint32_t pair) { return low_half(pair >> 16); }

template <bool kConvert>
void expect_exact() {
  using Pairs = tile::Float8Pairs<kConvert>;
  const auto expect = [](float got, uint32_t code) {
    const float want = to_float(Float8{static_cast<uint8_t>(code)});
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      return;
    }
    EXPECT_EQ(got * Pairs::kUnit, want) << code;
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << code;
  };
  for (uint32_t code = 0; code < 256; ++code) {
    // The other bytes of the word are 0, NaN of either sign, or the same code.
    for (const uint32_t other : {0u, 0xffu, 0x7fu, code}) {
      for (int byte = 0; byte < 4; ++byte) {
        const uint32_t others = (other * 0x01010101u) & ~(0xffu << 8 * byte);
        const uint32_t word = others | code << 8 * byte;
        const Pairs adjacent = Pairs::adjacent(word);
        const uint32_t adjacent_pair = byte < 2 ? adjacent.first : adjacent.second;
        expect(byte % 2 == 0 ? low_half(adjacent_pair) : high_half(adjacent_pair), code);
        const Pairs alternate = Pairs::alternate(word);
        const uint32_t alternate_pair = byte % 2 == 0 ? alternate.first : alternate.second;
        expect(byte < 2 ? low_half(alternate_pair) : high_half(alternate_pair), code);
      }
    }
  }
}

TEST(Float8, EveryCodeIsExact) {
  expect_exact<true>();
  expect_exact<false>();
}

// Element i of a cache: a code of an integer from -7 to 7, so that sums are exact.
uint8_t code_of(int i) { return from_float<Float8>(static_cast<float>(i * 5 % 15 - 7)).bits; }
float value_of(int i) { return to_float(Float8{code_of(i)}); }

constexpr int kColumns = 64;  // of float8: rows of 64 bytes, two steps of 32 columns
constexpr int kKeys = 16;
using Rows = tile::Swizzle<kColumns>;

void store_cache(ptx::SharedAddress to) {
  const int row = ptx::lane_index() % kKeys;
  for (int chunk = ptx::lane_index() / kKeys; chunk < kColumns / 16; chunk += 2) {
    uint32_t x[4] = {};
    for (int i = 0; i < 16; ++i)
      x[i / 4] |= static_cast<uint32_t>(code_of(row * kColumns + chunk * 16 + i)) << i % 4 * 8;
    ptx::st_shared_v4_b32(to + Rows::offset(row, chunk), x);
  }
  ptx::sync_warp();
}

// q[row][column] = row - column, in the order that float8 keys require.
void store_queries(ptx::SharedAddress to) {
  using Swizzle = tile::Swizzle<kColumns * 2>;
  const int row = ptx::lane_index() % 16;
  const auto pair = [&](int column) {
    return ptx::cvt_f16x2(static_cast<float>(row - column), static_cast<float>(row - column - 1));
  };
  for (int step = ptx::lane_index() / 16; step < kColumns / 16; step += 2) {
    uint32_t x[2][4];
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = pair(16 * step + 2 * i);
    tile::pair_words(x[0], x[1]);
    for (int half = 0; half < 2; ++half)
      ptx::st_shared_v4_b32(to + Swizzle::offset(row, 2 * step + half), x[half]);
  }
  ptx::sync_warp();
}

template <bool kConvert>
void expect_scores() {
  run_grid(1, 32, 4096, [] {
    const ptx::SharedAddress q = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress k = q + 16 * kColumns * 2;
    store_queries(q);
    store_cache(k);
    const int lane = ptx::lane_index();
    const tile::LaneOffsets<kColumns * 2, tile::Lanes::rows_first> q_lanes(lane);
    const tile::LaneOffsets<kColumns, tile::Lanes::chunks_first> k_lanes(lane);
    tile::Sums<1, 2> s;
    s.fill(0.0f);
    for (int step = 0; step < kColumns / 16; step += 2) {
      tile::Fragment<F16> b[2];
      tile::load_float8<kConvert>(b[0], b[1], k_lanes.address(k, 0, step / 2));
      for (int i = 0; i < 2; ++i) {
        const auto a = tile::load<F16>(q_lanes.address(q, 0, step + i));
        for (int n = 0; n < 2; ++n) tile::multiply_term<Sm90>(s.x[0][n], a, b[i], n, 0);
      }
    }
    for (int n = 0; n < 2; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8;
        const int key = 8 * n + lane % 4 * 2 + e % 2;
        float want = 0.0f;
        for (int c = 0; c < kColumns; ++c)
          want += static_cast<float>(row - c) * value_of(key * kColumns + c);
        EXPECT_EQ(s.x[0][n][e] * tile::Float8Pairs<kConvert>::kUnit, want) << row << " " << key;
      }
    }
  });
  EXPECT_EQ(emulator::statistics().matrix_load_conflicts, 0);
}

TEST(Float8, KeysTimesQueries) {
  expect_scores<true>();
  expect_scores<false>();
}

template <bool kConvert>
void expect_outputs() {
  run_grid(1, 32, 4096, [] {
    const ptx::SharedAddress v = ptx::shared_address(ptx::shared_memory());
    store_cache(v);
    const int lane = ptx::lane_index();
    // p[row][key] = row + key
    tile::Sums<1, 2> p;
    for (int n = 0; n < 2; ++n) {
      for (int e = 0; e < 4; ++e)
        p.x[0][n][e] = static_cast<float>(lane / 4 + e / 2 * 8 + 8 * n + lane % 4 * 2 + e % 2);
    }
    const auto a = tile::operand_of<F16>(p.x[0], 0);
    const tile::Float8B<kConvert, tile::LaneOffsets<kColumns, tile::Lanes::rows_first>> lanes(lane);
    tile::Sums<1, kColumns / 8> o;
    o.fill(0.0f);
    for (int j = 0; j < kColumns / 16; j += 2) {
      tile::Fragment<F16> b[2];
      lanes.load(b, v, 0, j / 2);
      for (int n = 0; n < 4; ++n)
        tile::multiply_term<Sm90>(o.x[0][2 * j + n], a, b[n / 2], n % 2, 0);
    }
    tile::pair_columns(o);
    using Columns = tile::FourColumns;
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8;
        const int column = Columns::of_tile(n) + Columns::of_lane(lane % 4 * 2) + e % 2;
        float want = 0.0f;
        for (int key = 0; key < kKeys; ++key)
          want += static_cast<float>(row + key) * value_of(key * kColumns + column);
        EXPECT_EQ(o.x[0][n][e] * tile::Float8Pairs<kConvert>::kUnit, want) << row << " " << column;
      }
    }
  });
  EXPECT_EQ(emulator::statistics().matrix_load_conflicts, 0);
}

TEST(Float8, WeightsTimesValues) {
  expect_outputs<true>();
  expect_outputs<false>();
}

}  // namespace
}  // namespace tilewise::cuda
