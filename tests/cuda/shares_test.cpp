// How the works of a last round are shared: every key tile is somebody's, once.
#include "cuda/shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace {

using tilewise::ceil_div;
using tilewise::cuda::Shares;

// As the planner cuts them.
Shares shares_of(int32_t works, int32_t key_tiles, int32_t blocks) {
  Shares shares;
  shares.works = works;
  shares.key_tiles = key_tiles;
  shares.stretch = static_cast<int32_t>(
      std::max(ceil_div(works * key_tiles, blocks), ceil_div(key_tiles, Shares::kMostParts - 1)));
  return shares;
}

void expect_whole(const Shares& shares, int32_t key_tiles, int32_t blocks) {
  const int32_t works = shares.works;
  std::vector<int> taken(static_cast<size_t>(works * key_tiles));
  std::vector<std::vector<int32_t>> slots(static_cast<size_t>(works));
  std::set<int32_t> all;
  for (int32_t block = 0; block < blocks; ++block) {
    for (const int32_t number : {0, 1}) {
      const Shares::Part part = shares.part(block, number);
      if (part.empty()) continue;
      ASSERT_LT(part.work, works);
      ASSERT_GE(part.begin, 0);
      ASSERT_LE(part.end, key_tiles);
      for (int32_t tile = part.begin; tile < part.end; ++tile)
        ++taken[static_cast<size_t>(part.work * key_tiles + tile)];
      const int32_t slot = Shares::slot(block, part.work);
      ASSERT_LT(slot, shares.slots());
      ASSERT_TRUE(all.insert(slot).second) << "two parts at " << slot;
      slots[static_cast<size_t>(part.work)].push_back(slot);
    }
  }
  ASSERT_TRUE(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
  for (int32_t work = 0; work < works; ++work) {
    const std::vector<int32_t>& mine = slots[static_cast<size_t>(work)];
    ASSERT_EQ(static_cast<int32_t>(mine.size()), shares.parts(work));
    ASSERT_LE(shares.parts(work), Shares::kMostParts);
    // One after the other, from where the second kernel looks for them.
    for (size_t i = 0; i < mine.size(); ++i)
      ASSERT_EQ(mine[i], Shares::slot(shares.first_block(work), work) + static_cast<int32_t>(i));
  }
}

TEST(Shares, EveryKeyTileIsTakenOnceAndPartsFollowEachOther) {
  for (const int32_t blocks : {1, 2, 4, 78, 132}) {
    for (int32_t works = 1; works < blocks + 1; works = works < 9 ? works + 1 : 2 * works - 5) {
      for (const int32_t key_tiles : {1, 2, 3, 8, 31, 32, 33, 63, 128, 1000}) {
        SCOPED_TRACE(testing::Message() << works << " works of " << key_tiles << " key tiles by "
                                        << blocks << " blocks");
        expect_whole(shares_of(works, key_tiles, blocks), key_tiles, blocks);
      }
    }
  }
}

TEST(Shares, NoneHaveNoSlots) {
  EXPECT_FALSE(Shares{}.any());
  EXPECT_EQ(Shares{}.slots(), 0);
}

}  // namespace
