// The schedule: every packed row, every tile and every key exactly once, whatever the sizes.
#include "attention/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "attention/band.h"

namespace {

using tilewise::Band;
using tilewise::EqualParts;
using tilewise::key_split;
using tilewise::Packing;
using tilewise::Range;
using tilewise::SplitRule;
using tilewise::Tiling;

TEST(Tiling, CoversItsLengthOnce) {
  for (int64_t length : {0, 1, 15, 16, 17, 100})
    for (int64_t step : {1, 3, 16, 64, 1000}) {
      const Tiling tiling{length, step};
      std::vector<int> visits(static_cast<size_t>(length));
      for (int64_t t = 0; t < tiling.count(); ++t) {
        const Range tile = tiling.at(t);
        EXPECT_FALSE(tile.empty());
        EXPECT_LE(tile.size(), step);
        for (int64_t i = tile.begin; i < tile.end; ++i) ++visits.at(static_cast<size_t>(i));
      }
      for (int count : visits) EXPECT_EQ(count, 1);
    }
}

TEST(Tiling, TouchingIsExactlyTheTilesThatMeetTheRange) {
  for (int64_t length : {1, 16, 17, 50})
    for (int64_t step : {1, 7, 16}) {
      const Tiling tiling{length, step};
      for (int64_t begin = 0; begin < length; ++begin)
        for (int64_t end = begin; end <= length; ++end) {
          const Range touching = tiling.touching({begin, end});
          for (int64_t t = 0; t < tiling.count(); ++t)
            EXPECT_EQ(touching.contains(t), !intersect(tiling.at(t), Range{begin, end}).empty());
        }
    }
  EXPECT_TRUE((Tiling{10, 4}.touching({8, 3}).empty()));
}

TEST(KeySplit, PartsAreWholeTilesThatCoverTheKeysOnce) {
  for (int64_t begin : {0, 5, 128})
    for (int64_t size : {0, 1, 63, 64, 65, 1000})
      for (int64_t splits = 1; splits <= 9; ++splits)
        for (int64_t tile : {1, 16, 64}) {
          const Range keys{begin, begin + size};
          int64_t next = keys.begin;
          for (int64_t s = 0; s < splits; ++s) {
            const Range part = key_split(keys, splits, s, tile);
            if (part.empty()) continue;
            EXPECT_EQ(part.begin, next);
            EXPECT_TRUE(part.end == keys.end || part.size() % tile == 0);
            next = part.end;
          }
          EXPECT_EQ(next, keys.end);
        }
}

struct Lengths {
  std::vector<int32_t> keys;

  int32_t all() const { return std::accumulate(keys.begin(), keys.end(), 0); }
  int32_t parts(int32_t part) const {
    int32_t count = 0;
    for (const int32_t each : keys) count += EqualParts::count(each, part);
    return count;
  }
  int32_t part(const EqualParts& rule) const {
    const EqualParts::Batch batch = {static_cast<int32_t>(keys.size()), all(),
                                     *std::max_element(keys.begin(), keys.end())};
    int32_t part = rule.first_chunk_size(batch);
    for (int turn = 0; parts(part) > rule.max_splits; ++turn) {
      EXPECT_LT(turn, 3);
      part = rule.next_chunk_size(batch, turn, part, parts(part));
    }
    return part;
  }
};

// Whatever the lengths, parts are whole tiles and no more than allowed; with room for a few beside
// the sequences, nearly as many.
TEST(EqualParts, AreAsManyAsAllowed) {
  constexpr int32_t kTile = 64;
  std::mt19937 random(1);
  std::lognormal_distribution<float> spread(0.0f, 1.0f);
  for (int32_t sequences : {1, 2, 3, 16, 33, 200})
    for (int32_t more : {0, 1, 5, sequences, 3 * sequences})
      for (int32_t keys : {0, 1, 100, 2048, 40000}) {
        Lengths lengths;
        for (int32_t i = 0; i < sequences; ++i)
          lengths.keys.push_back(static_cast<int32_t>(spread(random) * static_cast<float>(keys)));
        const EqualParts rule{sequences + more, 1, kTile};
        const int32_t part = lengths.part(rule);
        EXPECT_EQ(part % kTile, 0);
        EXPECT_LE(lengths.parts(part), rule.max_splits);
        if (keys == 40000 && sequences >= 16 && more >= sequences) {
          EXPECT_GT(lengths.parts(part), rule.max_splits * 3 / 4) << sequences << " + " << more;
        }
      }
  EXPECT_FALSE(EqualParts{}.any());
}

// Short ones may differ more than long ones before they are cut.
TEST(EqualParts, ShortOnesAreAlikeWhateverTheirRuleSays) {
  Lengths lengths;
  for (const int32_t tiles : {32, 8, 8, 8}) lengths.keys.push_back(tiles * 64);
  EqualParts rule{8, 1, 64};
  EXPECT_GT(lengths.parts(lengths.part(rule)), 4);
  rule.fourths = 10;
  EXPECT_EQ(lengths.parts(lengths.part(rule)), 4);
  lengths.keys[0] += 1;
  EXPECT_GT(lengths.parts(lengths.part(rule)), 4);
}

// Lengths that are alike are cut as they are where they are known.
TEST(EqualParts, OfLengthsThatAreAlikeAreAsAsked) {
  for (const int32_t alike : {1, 2, 7}) {
    const EqualParts rule{16 * 8, alike, 64};
    Lengths some{std::vector<int32_t>(16, 8192)};
    EXPECT_EQ(some.part(rule), (8192 / 64 + alike - 1) / alike * 64);
    some.keys[3] = 6000;
    some.keys[7] = 9900;
    EXPECT_LE(some.parts(some.part(rule)), 16 * alike);
    EXPECT_GE(some.parts(some.part(rule)), 12 * alike);
    some.keys[7] = 30000;
    EXPECT_GT(some.parts(some.part(rule)), 100);
  }
}

TEST(EqualParts, HaveAnEndAndABeginning) {
  const EqualParts rule{4, 1, 64};
  EXPECT_EQ(Lengths{{0}}.part(rule), 64);
  EXPECT_EQ((Lengths{{0, 256}}.part(rule)), 128);  // three, and one that is empty
  const Lengths long_one{{1, 1 << 29}};
  EXPECT_EQ(long_one.parts(long_one.part(rule)), 4);
  EXPECT_EQ(EqualParts::count(0, 64), 1);
  EXPECT_EQ(EqualParts::count(64, 64), 1);
  EXPECT_EQ(EqualParts::count(65, 64), 2);
  EXPECT_EQ(EqualParts::count(INT32_MAX, 1 << 29), 4);
}

TEST(Packing, EveryRowOfEveryHeadOnce) {
  for (int64_t rows : {1, 5, 16})
    for (int64_t group : {1, 2, 7, 8}) {
      const Packing packing{group};
      std::vector<int> visits(static_cast<size_t>(rows * group));
      for (int64_t r = 0; r < packing.packed(rows); ++r) {
        EXPECT_LT(packing.row(r), rows);
        EXPECT_LT(packing.head(r), group);
        ++visits.at(static_cast<size_t>(packing.row(r) * group + packing.head(r)));
      }
      for (int count : visits) EXPECT_EQ(count, 1);
      for (int64_t begin = 0; begin < packing.packed(rows); ++begin)
        for (int64_t end = begin + 1; end <= packing.packed(rows); ++end) {
          EXPECT_EQ(packing.rows({begin, end}).begin, packing.row(begin));
          EXPECT_EQ(packing.rows({begin, end}).end, packing.row(end - 1) + 1);
        }
    }
}

// Walking tiles as the kernels do, from the queries and from the keys, meets every visible pair
// once and both walks skip what nobody sees.
TEST(Schedule, BothWalksMeetEveryVisiblePairOnce) {
  for (int64_t rows : {1, 7, 33})
    for (int64_t keys : {1, 20, 33})
      for (int64_t left : {-1, 0, 5})
        for (int64_t right : {-1, 0, 3}) {
          const Band band = Band::make(rows, keys, left, right);
          const Tiling row_tiles{rows, 4};
          const Tiling key_tiles{keys, 6};
          std::vector<int> from_rows(static_cast<size_t>(rows * keys));
          std::vector<int> from_keys(from_rows.size());
          const auto visit = [&](std::vector<int>& visits, int64_t row_tile, int64_t key_tile) {
            const Range r = row_tiles.at(row_tile);
            const Range k = key_tiles.at(key_tile);
            for (int64_t i = r.begin; i < r.end; ++i)
              for (int64_t j = k.begin; j < k.end; ++j)
                visits.at(static_cast<size_t>(i * keys + j)) += band.visible(i, j);
          };
          for (int64_t a = 0; a < row_tiles.count(); ++a) {
            const Range touched = key_tiles.touching(band.keys_of_any(row_tiles.at(a)));
            for (int64_t b = touched.begin; b < touched.end; ++b) visit(from_rows, a, b);
          }
          for (int64_t b = 0; b < key_tiles.count(); ++b) {
            const Range touched = row_tiles.touching(band.rows_of_any(key_tiles.at(b)));
            for (int64_t a = touched.begin; a < touched.end; ++a) visit(from_keys, a, b);
          }
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < keys; ++j) {
              const auto at = static_cast<size_t>(i * keys + j);
              EXPECT_EQ(from_rows[at], band.visible(i, j));
              EXPECT_EQ(from_keys[at], band.visible(i, j));
            }
        }
}

TEST(Schedule, CausalSkipsAboutHalf) {
  const int64_t n = 4096;
  const Band band = Band::make(n, n, -1, 0);
  const Tiling tiles{n, 128};
  int64_t visited = 0;
  for (int64_t t = 0; t < tiles.count(); ++t)
    visited += tiles.touching(band.keys_of_any(tiles.at(t))).size();
  EXPECT_EQ(visited, tiles.count() * (tiles.count() + 1) / 2);
}

}  // namespace
