// Band: its ranges and its predicate, compared with a literal reading of the definition.
#include "attention/band.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/math.h"

namespace {

using tilewise::Band;
using tilewise::Range;

struct Shape {
  int64_t rows, keys, left, right, diagonal;

  Band band() const { return Band::make(rows, keys, left, right, diagonal); }
  bool sees(int64_t i, int64_t j) const {
    const int64_t aligned = i + keys - rows + diagonal;
    return (left < 0 || j >= aligned - left) && (right < 0 || j <= aligned + right);
  }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int64_t rows : {0, 1, 2, 5, 9})
    for (int64_t keys : {0, 1, 3, 5, 12})
      for (int64_t left : {-1, 0, 1, 4, 100})
        for (int64_t right : {-1, 0, 2, 100})
          for (int64_t diagonal : {0, -3, 2, 30, -(1 << 30), 1 << 30})
            all.push_back({rows, keys, left, right, diagonal});
  return all;
}

TEST(Band, PredicateAndRangesFollowTheDefinition) {
  for (const Shape& shape : shapes()) {
    const Band band = shape.band();
    for (int64_t i = 0; i < shape.rows; ++i) {
      for (int64_t j = 0; j < shape.keys; ++j) {
        const bool expected = shape.sees(i, j);
        EXPECT_EQ(band.visible(i, j), expected)
            << shape.rows << 'x' << shape.keys << ' ' << i << ',' << j;
        EXPECT_EQ(band.keys_of(i).contains(j), expected);
        EXPECT_EQ(band.rows_of(j).contains(i), expected);
      }
      EXPECT_GE(band.keys_of(i).begin, 0);
      EXPECT_LE(band.keys_of(i).begin, shape.keys);
      EXPECT_LE(band.keys_of(i).end, shape.keys);
    }
  }
}

TEST(Band, TransposingExchangesRowsAndKeys) {
  for (const Shape& shape : shapes()) {
    const Band band = shape.band();
    const Band transposed = band.transposed();
    for (int64_t i = 0; i < shape.rows; ++i)
      for (int64_t j = 0; j < shape.keys; ++j)
        EXPECT_EQ(band.visible(i, j), transposed.visible(j, i));
    const Band twice = transposed.transposed();
    EXPECT_EQ(twice.rows, band.rows);
    EXPECT_EQ(twice.left, band.left);
    EXPECT_EQ(twice.right, band.right);
    EXPECT_EQ(twice.diagonal, band.diagonal);
  }
}

// `any` must not lose a visible pair, which would give a wrong result; `all` must not contain a
// hidden one.
void check_tile(const Band& band, Range rows) {
  const Range any = band.keys_of_any(rows);
  const Range all = band.keys_of_all(rows);
  for (int64_t j = 0; j < band.keys; ++j) {
    bool seen_by_any = false;
    bool seen_by_all = true;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      seen_by_any |= band.visible(i, j);
      seen_by_all &= band.visible(i, j);
    }
    EXPECT_TRUE(any.contains(j) || !seen_by_any);
    EXPECT_EQ(all.contains(j), seen_by_all);
  }
}

TEST(Band, TileRangesAreTheUnionAndTheIntersectionOfTheirRows) {
  for (const Shape& shape : shapes()) {
    const int64_t rows = shape.rows;
    const int64_t keys = shape.keys;
    const Band band = shape.band();
    for (int64_t begin = 0; begin < rows; ++begin)
      for (int64_t end = begin + 1; end <= rows; ++end) {
        check_tile(band, {begin, end});
        for (int64_t first = 0; first < keys; ++first)
          for (int64_t last = first + 1; last <= keys; ++last) {
            bool full = true;
            for (int64_t i = begin; i < end; ++i)
              for (int64_t j = first; j < last; ++j) full &= band.visible(i, j);
            EXPECT_EQ(band.covers({begin, end}, {first, last}), full);
          }
      }
    for (int64_t begin = 0; begin < keys; ++begin)
      for (int64_t end = begin + 1; end <= keys; ++end) check_tile(band.transposed(), {begin, end});
  }
}

TEST(Band, UnionIsTightWhenEveryRowSeesAKey) {
  // With a causal mask and as many rows as keys, the keys of a tile end at those of its last row;
  // otherwise half the work would be wasted.
  const Band band = Band::make(100, 100, -1, 0);
  EXPECT_EQ(band.keys_of_any({32, 64}).end, 64);
  EXPECT_EQ(band.rows_of_any({32, 64}).begin, 32);
  EXPECT_EQ(band.rows_of_any({32, 64}).end, 100);
  EXPECT_EQ(band.keys_of_all({32, 64}).end, 33);
  const Band window = Band::make(100, 100, 8, 0);
  EXPECT_EQ(window.keys_of_any({32, 64}).begin, 24);
  EXPECT_EQ(window.rows_of_any({32, 64}).end, 72);
}

// A shard of a band: rows and keys from some row and key on, with the diagonal that tilewise.h
// gives for them.
TEST(Band, ShardsSeeWhatTheWholeSees) {
  constexpr int64_t kRows = 9;
  constexpr int64_t kKeys = 12;
  for (int64_t left : {-1, 0, 3})
    for (int64_t right : {-1, 0, 2})
      for (Range rows : {Range{0, 9}, Range{0, 4}, Range{4, 9}, Range{5, 6}})
        for (Range keys : {Range{0, 12}, Range{0, 5}, Range{5, 12}, Range{7, 8}}) {
          const Band whole = Band::make(kRows, kKeys, left, right);
          const int64_t diagonal =
              rows.begin - keys.begin + whole.shift() - (keys.size() - rows.size());
          const Band shard = Band::make(rows.size(), keys.size(), left, right, diagonal);
          for (int64_t i = 0; i < rows.size(); ++i)
            for (int64_t j = 0; j < keys.size(); ++j)
              EXPECT_EQ(shard.visible(i, j), whole.visible(rows.begin + i, keys.begin + j));
        }
}

TEST(Band, HugeSizesAndLimitsDoNotOverflow) {
  const int64_t many = int64_t{1} << 45;
  const Band band = Band::make(many, many, INT64_MAX, 0);
  EXPECT_TRUE(band.visible(many - 1, many - 1));
  EXPECT_TRUE(band.visible(many - 1, 0));
  EXPECT_FALSE(band.visible(0, 1));
  const Band unlimited = Band::make(1, many, -1, -1);
  EXPECT_TRUE(unlimited.visible(0, many - 1));
  EXPECT_TRUE(Band::make(many, 1, INT64_MAX, INT64_MAX).visible(0, 0));
}

}  // namespace
