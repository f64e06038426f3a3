// The Stream-K tail: every key tile belongs to exactly one share.
#include "cuda/stream_k_tail.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace {

using tilewise::ceil_div;
using tilewise::cuda::StreamKTail;

// The shares as the planner sizes them.
StreamKTail tail_of(int32_t tiles, int32_t key_tiles, int32_t blocks) {
  StreamKTail tail;
  tail.tiles = tiles;
  tail.key_tiles = key_tiles;
  tail.key_tiles_per_cta = static_cast<int32_t>(std::max(
      ceil_div(tiles * key_tiles, blocks), ceil_div(key_tiles, StreamKTail::kMaxShares - 1)));
  return tail;
}

void expect_whole(const StreamKTail& tail, int32_t key_tiles, int32_t blocks) {
  const int32_t tiles = tail.tiles;
  std::vector<int> taken(static_cast<size_t>(tiles * key_tiles));
  std::vector<std::vector<int32_t>> results(static_cast<size_t>(tiles));
  std::set<int32_t> all;
  for (int32_t block = 0; block < blocks; ++block) {
    for (const int32_t number : {0, 1}) {
      const StreamKTail::Share share = tail.share(block, number);
      if (share.empty()) continue;
      ASSERT_LT(share.tile, tiles);
      ASSERT_GE(share.begin, 0);
      ASSERT_LE(share.end, key_tiles);
      for (int32_t key_tile = share.begin; key_tile < share.end; ++key_tile)
        ++taken[static_cast<size_t>(share.tile * key_tiles + key_tile)];
      const int32_t result = StreamKTail::result_index(block, share.tile);
      ASSERT_LT(result, tail.num_results());
      ASSERT_TRUE(all.insert(result).second) << "two results at " << result;
      results[static_cast<size_t>(share.tile)].push_back(result);
    }
  }
  ASSERT_TRUE(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const std::vector<int32_t>& of_tile = results[static_cast<size_t>(tile)];
    ASSERT_EQ(static_cast<int32_t>(of_tile.size()), tail.shares_of(tile));
    ASSERT_LE(tail.shares_of(tile), StreamKTail::kMaxShares);
    // The combine kernel expects the results of a tile next to each other.
    for (size_t i = 0; i < of_tile.size(); ++i)
      ASSERT_EQ(of_tile[i],
                StreamKTail::result_index(tail.first_block(tile), tile) + static_cast<int32_t>(i));
  }
}

TEST(StreamKTail, EveryKeyTileIsInOneShareAndResultsAreContiguous) {
  for (const int32_t blocks : {1, 2, 4, 78, 132}) {
    for (int32_t tiles = 1; tiles < blocks + 1; tiles = tiles < 9 ? tiles + 1 : 2 * tiles - 5) {
      for (const int32_t key_tiles : {1, 2, 3, 8, 31, 32, 33, 63, 128, 1000}) {
        SCOPED_TRACE(testing::Message() << tiles << " tiles of " << key_tiles << " key tiles by "
                                        << blocks << " blocks");
        expect_whole(tail_of(tiles, key_tiles, blocks), key_tiles, blocks);
      }
    }
  }
}

TEST(StreamKTail, AnEmptyTailHasNoResults) {
  EXPECT_FALSE(StreamKTail{}.any());
  EXPECT_EQ(StreamKTail{}.num_results(), 0);
}

}  // namespace
