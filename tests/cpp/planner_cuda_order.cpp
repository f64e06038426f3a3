// Which block of a CUDA grid takes which tile: every one once, and all blocks are done together.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

// On Hopper, causal tiles whose lengths follow from the shape: pairs, two works that are as long as
// any other two, and then the rest, longest first. No counter, and with it no kernel before.
TEST(PlannerCudaOrder, CausalTilesAreDealtInRounds) {
  const Device device = gpu_with(90);
  for (const int64_t rows : {512, 640, 4096}) {
    Problem p = problem(TILEWISE_BFLOAT16, 16384 / rows, rows, rows, 16);
    p.window_right = 0;
    const cuda::Plan plan = forward(p, device);
    EXPECT_FALSE(plan.dynamic_scheduling);
    EXPECT_GT(plan.order.paired_tiles, 0);
    EXPECT_LT(plan.order.paired_tiles, plan.blocks);
    EXPECT_EQ(plan.order.paired_tiles % 2, 0);
    for (int64_t i = 0; i < plan.order.paired_tiles; i += 2)
      ASSERT_EQ(plan.order.at(i).tile + plan.order.at(i + 1).tile, plan.order.tiles - 1);
    for (int64_t i = plan.order.paired_tiles + 1; i < plan.blocks; ++i)
      ASSERT_LE(plan.order.at(i).tile, plan.order.at(i - 1).tile);
  }
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16, 32, 512, 512, 16), device).order.paired_tiles, 0);
}

// Lengths that the shape does not tell are counted, where a block has more than one work.
TEST(PlannerCudaOrder, WorksOfUnknownLengthAreCounted) {
  const Device device = gpu_with(90);
  const auto nowhere = reinterpret_cast<const int32_t*>(uintptr_t{64});
  for (const int64_t batch : {1, 32}) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 512, 512, 16);
    p.window_right = 0;
    EXPECT_FALSE(forward(p, device).dynamic_scheduling);
    p.seqused_k = nowhere;
    EXPECT_EQ(forward(p, device).dynamic_scheduling, batch > 1);
  }
}

// So are causal tiles that do not grow evenly: of many rows that see no key, or all of them.
TEST(PlannerCudaOrder, UnevenTilesAreCounted) {
  struct Shape {
    int64_t rows, keys, left, right;
    bool rounds;
  };
  const Shape shapes[] = {
      {2048, 2048, -1, 0, true},    {2048, 8192, -1, 0, true},   // later rows, more keys each
      {2048, 2000, -1, 0, true},    {2048, 1024, -1, 0, false},  // rows without keys
      {4096, 1024, -1, 0, false},   {2048, 1024, -1, 1024, false},
      {2048, 2048, -1, 100, true},  {2048, 2048, -1, 1000, false},  // rows with all keys
      {2048, 2048, 0, -1, true},    {2048, 2048, 1000, -1, false},
      {2048, 4096, 1000, -1, true}, {2048, 4096, 4000, -1, false},
      {2048, 1024, 0, -1, false},   {2048, 2048, INT64_MAX, -1, false},
  };
  for (const Shape& shape : shapes) {
    Problem p = problem(TILEWISE_BFLOAT16, 8, shape.rows, shape.keys, 16);
    p.window_left = shape.left;
    p.window_right = shape.right;
    const cuda::Plan plan = forward(p, gpu_with(90));
    EXPECT_EQ(plan.order.paired_tiles > 0, shape.rounds) << shape.rows << " x " << shape.keys;
    // A limit beyond the first key hides nothing, and tiles are alike.
    const bool hides = shape.left < shape.keys - 1;
    EXPECT_EQ(plan.dynamic_scheduling, !shape.rounds && hides) << shape.rows << " x " << shape.keys;
  }
}

// Blocks that take works in rounds are done together, nearly as those that take them one by one.
TEST(PlannerCudaOrder, RoundsOfCausalTilesAreBalanced) {
  for (const int64_t rows : {256, 512, 640, 1024, 2048, 4096, 16384}) {
    for (const int64_t heads : {16, 40, 64}) {
      Problem p = problem(TILEWISE_BFLOAT16, 16384 / rows, rows, rows, heads);
      p.window_right = 0;
      const Device device = gpu_with(90);
      const cuda::Plan plan = forward(p, device);
      const int64_t grid = device.gpu.sm_count;
      const int64_t pairs = plan.order.paired_tiles / 2;
      std::vector<int64_t> tiles(static_cast<size_t>(grid));
      int64_t all = 0;
      const auto take = [&](int64_t block, int64_t work) {
        const int64_t size = plan.order.at(work).tile + 1;
        tiles[static_cast<size_t>(block)] += size;
        all += size;
      };
      for (int64_t at = 0; at < plan.blocks - pairs; ++at) {
        const int64_t block = at / grid % 2 == 0 ? at % grid : grid - 1 - at % grid;
        take(block, at < pairs ? 2 * at : at + pairs);
        if (at < pairs) take(block, 2 * at + 1);
      }
      const int64_t share = ceil_div(all, grid);
      const int64_t least = max<int64_t>(share, plan.order.tiles);
      EXPECT_LE(*std::max_element(tiles.begin(), tiles.end()), least + least / 6)
          << rows << " rows, " << heads << " heads";
    }
  }
}

// Every tile of every head of every sequence comes up exactly once, in any order.
TEST(PlannerCudaOrder, TheOrderVisitsEveryTileOnce) {
  for (int64_t batch : {1, 3, 30}) {
    for (int64_t heads : {1, 5, 40}) {
      for (int64_t window : {-1, 0}) {
        Problem p = problem(TILEWISE_BFLOAT16, batch, 1000, 3000, heads);
        p.window_right = window;
        const Gradients g = gradients(p);
        for (const Gradients* pass : {static_cast<const Gradients*>(nullptr), &g}) {
          const cuda::Plan plan = dispatch::plan(p, pass, gpu_with(90)).cuda;
          std::vector<int> seen(static_cast<size_t>(plan.blocks));
          for (int64_t block = 0; block < plan.blocks; ++block) {
            const cuda::TileOrder::WorkTile w = plan.order.at(block);
            ASSERT_LT(w.tile, plan.order.tiles);
            ASSERT_LT(w.sequence, batch);
            ++seen[static_cast<size_t>(
                ((w.sequence * plan.order.heads + w.head) * plan.order.tiles + w.tile) *
                    plan.order.splits +
                w.split)];
          }
          for (int count : seen) ASSERT_EQ(count, 1);
        }
      }
    }
  }
}

// The splits of a tile follow each other, and so does the cluster that merges them.
TEST(PlannerCudaOrder, SplitsOfATileFollowEachOther) {
  constexpr int64_t kSplits = 6;
  Problem p = problem(TILEWISE_BFLOAT16, 30, 1, 8192, 5);
  p.num_splits = kSplits;
  const cuda::Plan plan = forward(p, gpu_with(90));
  ASSERT_EQ(plan.blocks, 30 * 5 * kSplits);
  for (int64_t block = 0; block < plan.blocks; ++block) {
    const cuda::TileOrder::WorkTile w = plan.order.at(block);
    ASSERT_EQ(w.tile, 0);
    ASSERT_EQ((w.sequence * 5 + w.head) * kSplits + w.split, block);
    const cuda::TileOrder::WorkTile only = plan.order.at_only_tile(block);
    ASSERT_EQ((only.sequence * 5 + only.head) * kSplits + only.split, block);
  }
}

// A key tile waits for the ones before it, so they have to start first: from the first one up, or
// from the last one down.
TEST(PlannerCudaOrder, DeterministicKeyTilesFollowEachOther) {
  for (int64_t left : {-1, 100}) {
    for (int64_t right : {-1, 0}) {
      Problem p = problem(TILEWISE_BFLOAT16, 2, 1000, 3000, 5);
      p.window_left = left;
      p.window_right = right;
      p.deterministic = 1;
      const Gradients g = gradients(p);
      const cuda::Plan plan = dispatch::plan(p, &g, gpu_with(90)).cuda;
      const bool down = plan.order.longest_first == 1;
      std::vector<int> last(static_cast<size_t>(2 * 5), down ? int32_t{plan.order.tiles} : -1);
      for (int64_t block = 0; block < plan.blocks; ++block) {
        const cuda::TileOrder::WorkTile w = plan.order.at(block);
        int& before = last[static_cast<size_t>(w.sequence * 5 + w.head)];
        ASSERT_EQ(w.tile, before + (down ? -1 : 1));
        before = w.tile;
      }
    }
  }
}

// On Hopper they start in the order of their turns, over as many heads as fill the GPU: causal ones
// from the last one up, where a turn is short. One piece of work a block.
TEST(PlannerCudaOrder, DeterministicKeyTilesOfManyHeadsStartTogether) {
  const Device device = gpu_with(90);
  const auto planned = [&](int64_t right, int64_t head_dim) {
    Problem p = problem(TILEWISE_BFLOAT16, 4, 4096, 4096, 16, head_dim);
    p.window_right = right;
    p.deterministic = 1;
    const Gradients g = gradients(p);
    const cuda::Plan plan = dispatch::plan(p, &g, device).cuda;
    EXPECT_EQ(cuda::backward_workspace(p, g, plan).tile_counter.bytes, 0u);
    return plan;
  };
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t right : {-1, 0}) {
      const cuda::TileOrder order = planned(right, head_dim).order;
      const int64_t heads = ceil_div(device.gpu.sm_count, int64_t{order.tiles});
      const int32_t first = right < 0 ? 0 : order.tiles - 1;
      const int32_t second = right < 0 ? 1 : order.tiles - 2;
      for (int64_t i = 0; i < heads; ++i) {
        EXPECT_EQ(order.at(i).tile, first);
        EXPECT_EQ(order.at(i).head, i);
        EXPECT_EQ(order.at(heads + i).tile, second);
      }
    }
  }
  EXPECT_EQ(planned(0, 256).order.at(0).tile, 0);
}

}  // namespace
}  // namespace tilewise::dispatch
