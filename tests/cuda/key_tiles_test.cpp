// Compares the key tiles that a forward CTA computes, for every split, with the band itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/common/query_tile.h"

namespace {

using tilewise::Band;
using tilewise::Range;
using tilewise::cuda::ForwardParams;
using tilewise::cuda::KeyTiles;
using tilewise::cuda::QueryRows;

constexpr int32_t kKeyTile = 32;

struct Shape {
  int64_t rows, keys, left, right, diagonal;
};

ForwardParams params_of(int32_t splits, int32_t row_tile) {
  ForwardParams p{};
  p.packing = {1};
  p.group = 1;
  p.pack_reciprocal = 1u << 31;
  p.row_tile = row_tile;
  p.key_tile = kKeyTile;
  p.order.splits = splits;
  return p;
}

// Every key that some row of the tile sees is in the tiles of exactly one split, and no split has a
// tile past the last key in use.
void check(const Shape& shape, int32_t splits) {
  const Band band = Band::make(shape.rows, shape.keys, shape.left, shape.right, shape.diagonal);
  const ForwardParams p = params_of(splits, 16);
  for (int32_t tile = 0; int64_t{tile} * p.row_tile < shape.rows; ++tile) {
    const QueryRows rows = QueryRows::of(p, band, tile, 0);
    const int64_t begin = int64_t{tile} * p.row_tile;
    const Range any = band.keys_of_any({begin, std::min(begin + p.row_tile, shape.rows)});
    std::vector<int> walked(static_cast<size_t>(shape.keys / kKeyTile + 1), 0);
    for (int32_t split = 0; split < splits; ++split) {
      const KeyTiles tiles = KeyTiles::of(band, rows, split, p.splits_of(band), kKeyTile);
      if (tiles.last < tiles.first) continue;
      ASSERT_GE(tiles.first, 0);
      ASSERT_LT(int64_t{tiles.last} * kKeyTile, any.end) << "tile " << tile << " split " << split;
      for (int32_t t = tiles.first; t <= tiles.last; ++t) ++walked[static_cast<size_t>(t)];
    }
    for (int64_t key = 0; key < shape.keys; ++key) {
      const int times = walked[static_cast<size_t>(key / kKeyTile)];
      if (any.contains(key)) {
        ASSERT_EQ(times, 1) << "tile " << tile << " key " << key;
      }
      ASSERT_LE(times, 1);
    }
    const KeyTiles first = KeyTiles::of(band, rows, 0, splits, kKeyTile);
    KeyTiles cut_later = KeyTiles::of(band, rows, 0, 1, kKeyTile);
    cut_later.narrow_to_first_split(splits);
    ASSERT_EQ(cut_later.first, first.first) << "tile " << tile;
    ASSERT_EQ(cut_later.last, first.last) << "tile " << tile;
  }
}

TEST(KeyTiles, SplitsCoverWhatTheRowsSee) {
  for (const int64_t rows : {1, 15, 70, 300}) {
    for (const int64_t keys : {0, 1, 3, 31, 32, 33, 64, 700}) {
      for (const int64_t left : {-1, 0, 5, 600}) {
        for (const int64_t right : {-1, 0, 7}) {
          for (const int64_t diagonal : {0, 17, -40, 500, -800, 1 << 30, -(1 << 30)}) {
            for (int32_t splits = 1; splits < 9; ++splits) {
              SCOPED_TRACE(testing::Message()
                           << rows << " rows, " << keys << " keys, window " << left << ", " << right
                           << ", diagonal " << diagonal << ", " << splits << " splits");
              check({rows, keys, left, right, diagonal}, splits);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

}  // namespace
