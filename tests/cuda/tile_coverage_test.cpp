// The bits of the tiles that a mask shows, compared with a list of their coverage.
#include "cuda/common/tile_coverage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "emulator/grid.h"

namespace {

using tilewise::Coverage;
using tilewise::cuda::common::TileCoverage;

// The coverage of the tiles if one entry stands for `step` of them.
std::vector<Coverage> by_entries(const std::vector<Coverage>& tiles, size_t step) {
  std::vector<Coverage> result;
  for (size_t first = 0; first < tiles.size(); first += step) {
    const size_t end = std::min(tiles.size(), first + step);
    const auto is = [&](Coverage c) {
      return std::all_of(tiles.begin() + static_cast<long>(first),
                         tiles.begin() + static_cast<long>(end),
                         [&](Coverage x) { return x == c; });
    };
    const Coverage entry = is(Coverage::none)   ? Coverage::none
                           : is(Coverage::full) ? Coverage::full
                                                : Coverage::partial;
    result.insert(result.end(), end - first, entry);
  }
  return result;
}

TEST(TileCoverage, WalksTheVisibleTilesInBothDirections) {
  for (const int32_t tiles : {0, 1, 31, 32, 33, 500, 1023, 1024, 1025, 3000, 5000}) {
    for (const int hidden_of_ten : {0, 5, 9, 10}) {
      std::mt19937 random(static_cast<uint32_t>(tiles * 11 + hidden_of_ten));
      const auto below = [&](int n) {
        return std::uniform_int_distribution<int>(0, n - 1)(random);
      };
      std::vector<Coverage> drawn;
      for (int32_t i = 0; i < tiles; ++i) {
        drawn.push_back(below(10) < hidden_of_ten ? Coverage::none
                        : below(2) == 0           ? Coverage::full
                                                  : Coverage::partial);
      }
      const size_t step = size_t{1} << TileCoverage::shift_of(tiles);
      const std::vector<Coverage> want = by_entries(drawn, step);
      std::vector<int32_t> visible;
      for (int32_t i = 0; i < tiles; ++i)
        if (want[static_cast<size_t>(i)] != Coverage::none) visible.push_back(i);

      TileCoverage coverage;
      tilewise::cuda::emulator::run_grid(1, 128, 0, [&] {
        coverage.find(tiles, 128, [&](int32_t first, int32_t end) {
          EXPECT_EQ(static_cast<size_t>(end - first), std::min(step, drawn.size() - first));
          return want[static_cast<size_t>(first)];
        });
      });
      EXPECT_EQ(coverage.count(tiles), static_cast<int32_t>(visible.size()));
      for (const int32_t i : visible)
        EXPECT_EQ(coverage.is_full(i), want[static_cast<size_t>(i)] == Coverage::full);
      std::vector<int32_t> forth, back;
      for (int32_t i = coverage.first_from(0, tiles); i < tiles;
           i = coverage.first_from(i + 1, tiles))
        forth.push_back(i);
      for (int32_t i = coverage.last_before(tiles); i >= 0; i = coverage.last_before(i))
        back.push_back(i);
      std::reverse(back.begin(), back.end());
      EXPECT_EQ(forth, visible);
      EXPECT_EQ(back, visible);
    }
  }
}

}  // namespace
