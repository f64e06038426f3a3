// The schedule covers every packed row, every tile and every key exactly once, for all sizes.
#include "attention/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "attention/band.h"

namespace {

using tilewise::Band;
using tilewise::ChunkSchedule;
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

TEST(KeySplit, SplitsAreWholeTilesThatCoverTheKeysOnce) {
  for (int64_t begin : {0, 5, 128})
    for (int64_t size : {0, 1, 63, 64, 65, 1000})
      for (int64_t splits = 1; splits <= 9; ++splits)
        for (int64_t tile : {1, 16, 64}) {
          const Range keys{begin, begin + size};
          int64_t next = keys.begin;
          for (int64_t s = 0; s < splits; ++s) {
            const Range split = key_split(keys, splits, s, tile);
            if (split.empty()) continue;
            EXPECT_EQ(split.begin, next);
            EXPECT_TRUE(split.end == keys.end || split.size() % tile == 0);
            next = split.end;
          }
          EXPECT_EQ(next, keys.end);
        }
}

struct Lengths {
  std::vector<int32_t> keys;

  int32_t all() const { return std::accumulate(keys.begin(), keys.end(), 0); }
  int32_t chunks(int32_t size) const {
    int32_t count = 0;
    for (const int32_t length : keys) count += ChunkSchedule::count(length, size);
    return count;
  }
  int32_t chunk_size(const ChunkSchedule& schedule) const {
    const ChunkSchedule::Batch batch = {static_cast<int32_t>(keys.size()), all(),
                                        *std::max_element(keys.begin(), keys.end())};
    int32_t size = schedule.first_chunk_size(batch);
    for (int attempt = 0; chunks(size) > schedule.max_chunks; ++attempt) {
      EXPECT_LT(attempt, 3);
      size = schedule.next_chunk_size(batch, attempt, size, chunks(size));
    }
    return size;
  }
};

// Whatever the lengths, chunks are whole tiles and no more than allowed; if a few more than one per
// sequence are allowed, there are nearly as many.
TEST(ChunkSchedule, ChunkCountStaysWithinTheLimit) {
  constexpr int32_t kTile = 64;
  std::mt19937 random(1);
  std::lognormal_distribution<float> spread(0.0f, 1.0f);
  for (int32_t sequences : {1, 2, 3, 16, 33, 200})
    for (int32_t more : {0, 1, 5, sequences, 3 * sequences})
      for (int32_t keys : {0, 1, 100, 2048, 40000}) {
        Lengths lengths;
        for (int32_t i = 0; i < sequences; ++i)
          lengths.keys.push_back(static_cast<int32_t>(spread(random) * static_cast<float>(keys)));
        const ChunkSchedule schedule{sequences + more, 1, kTile};
        const int32_t size = lengths.chunk_size(schedule);
        EXPECT_EQ(size % kTile, 0);
        EXPECT_LE(lengths.chunks(size), schedule.max_chunks);
        if (keys == 40000 && sequences >= 16 && more >= sequences) {
          EXPECT_GT(lengths.chunks(size), schedule.max_chunks * 3 / 4)
              << sequences << " + " << more;
        }
      }
  EXPECT_FALSE(ChunkSchedule{}.any());
}

// Short sequences may differ more than long ones before they count as varlen.
TEST(ChunkSchedule, ShortSequencesMayDifferMore) {
  Lengths lengths;
  for (const int32_t tiles : {32, 8, 8, 8}) lengths.keys.push_back(tiles * 64);
  ChunkSchedule schedule{8, 1, 64};
  EXPECT_GT(lengths.chunks(lengths.chunk_size(schedule)), 4);
  schedule.max_imbalance_quarters = 10;
  EXPECT_EQ(lengths.chunks(lengths.chunk_size(schedule)), 4);
  lengths.keys[0] += 1;
  EXPECT_GT(lengths.chunks(lengths.chunk_size(schedule)), 4);
}

// Sequences of uniform lengths have the chunks that they would have if the host knew the lengths.
TEST(ChunkSchedule, UniformLengthsGetTheRequestedChunks) {
  for (const int32_t chunks : {1, 2, 7}) {
    const ChunkSchedule schedule{16 * 8, chunks, 64};
    Lengths lengths{std::vector<int32_t>(16, 8192)};
    EXPECT_EQ(lengths.chunk_size(schedule), (8192 / 64 + chunks - 1) / chunks * 64);
    lengths.keys[3] = 6000;
    lengths.keys[7] = 9900;
    EXPECT_LE(lengths.chunks(lengths.chunk_size(schedule)), 16 * chunks);
    EXPECT_GE(lengths.chunks(lengths.chunk_size(schedule)), 12 * chunks);
    lengths.keys[7] = 30000;
    EXPECT_GT(lengths.chunks(lengths.chunk_size(schedule)), 100);
  }
}

TEST(ChunkSchedule, EmptyAndVeryLongSequences) {
  const ChunkSchedule schedule{4, 1, 64};
  EXPECT_EQ(Lengths{{0}}.chunk_size(schedule), 64);
  EXPECT_EQ((Lengths{{0, 256}}.chunk_size(schedule)), 128);  // three chunks, and one empty sequence
  const Lengths long_one{{1, 1 << 29}};
  EXPECT_EQ(long_one.chunks(long_one.chunk_size(schedule)), 4);
  EXPECT_EQ(ChunkSchedule::count(0, 64), 1);
  EXPECT_EQ(ChunkSchedule::count(64, 64), 1);
  EXPECT_EQ(ChunkSchedule::count(65, 64), 2);
  EXPECT_EQ(ChunkSchedule::count(INT32_MAX, 1 << 29), 4);
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

// Iterating over tiles from the queries and from the keys, as the kernels do, visits every visible
// pair once, and both skip tiles without visible pairs.
TEST(Schedule, BothTileOrdersVisitEveryVisiblePairOnce) {
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
