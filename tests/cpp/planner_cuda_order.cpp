// The order of work tiles in a CUDA grid: every tile comes once, and the load is balanced.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/wgmma/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

// On Hopper, causal tiles whose lengths follow from the shape are taken in pairs of equal total
// length; the rest follows, longest first. That needs no tile counter and no kernel that zeroes it.
TEST(PlannerCudaOrder, CausalTilesAreTakenInPairs) {
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

// Tiles whose lengths do not follow from the shape are scheduled dynamically if there are more
// tiles than CTAs.
TEST(PlannerCudaOrder, TilesOfUnknownLengthAreScheduledDynamically) {
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

// Causal tiles whose lengths do not grow linearly, because many rows attend to no key or to all
// keys, are also scheduled dynamically.
TEST(PlannerCudaOrder, TilesThatGrowUnevenlyAreScheduledDynamically) {
  struct Shape {
    int64_t rows, keys, left, right;
    bool paired;
  };
  const Shape shapes[] = {
      {.rows = 2048, .keys = 2048, .left = -1, .right = 0, .paired = true},
      // The rows are aligned with the last keys.
      {.rows = 2048, .keys = 8192, .left = -1, .right = 0, .paired = true},
      {.rows = 2048, .keys = 2000, .left = -1, .right = 0, .paired = true},
      // 1024 rows or more attend to no key or, in the third shape, to all keys.
      {.rows = 2048, .keys = 1024, .left = -1, .right = 0, .paired = false},
      {.rows = 4096, .keys = 1024, .left = -1, .right = 0, .paired = false},
      {.rows = 2048, .keys = 1024, .left = -1, .right = 1024, .paired = false},
      {.rows = 2048, .keys = 2048, .left = -1, .right = 100, .paired = true},
      // 1000 rows attend to all keys.
      {.rows = 2048, .keys = 2048, .left = -1, .right = 1000, .paired = false},
      {.rows = 2048, .keys = 2048, .left = 0, .right = -1, .paired = true},
      {.rows = 2048, .keys = 2048, .left = 1000, .right = -1, .paired = false},
      {.rows = 2048, .keys = 4096, .left = 1000, .right = -1, .paired = true},
      {.rows = 2048, .keys = 4096, .left = 4000, .right = -1, .paired = false},
      {.rows = 2048, .keys = 1024, .left = 0, .right = -1, .paired = false},
      {.rows = 2048, .keys = 2048, .left = INT64_MAX, .right = -1, .paired = false},
  };
  for (const Shape& shape : shapes) {
    Problem p = problem(TILEWISE_BFLOAT16, 8, shape.rows, shape.keys, 16);
    p.window_left = shape.left;
    p.window_right = shape.right;
    const cuda::Plan plan = forward(p, gpu_with(90));
    EXPECT_EQ(plan.order.paired_tiles > 0, shape.paired) << shape.rows << " x " << shape.keys;
    // A limit beyond the first key masks nothing, so all tiles are equally long.
    const bool masks = shape.left < shape.keys - 1;
    EXPECT_EQ(plan.dynamic_scheduling, !shape.paired && masks) << shape.rows << " x " << shape.keys;
  }
}

// With paired tiles in waves no CTA has more than 7/6 of the key tiles of the mean CTA, or of the
// longest tile if that has more.
TEST(PlannerCudaOrder, PairedWavesAreBalanced) {
  for (const int64_t rows : {256, 512, 640, 1024, 2048, 4096, 16384}) {
    for (const int64_t heads : {16, 40, 64}) {
      Problem p = problem(TILEWISE_BFLOAT16, 16384 / rows, rows, rows, heads);
      p.window_right = 0;
      const Device device = gpu_with(90);
      const cuda::Plan plan = forward(p, device);
      const int64_t grid = device.gpu.sm_count;
      const int64_t pairs = plan.order.paired_tiles / 2;
      std::vector<int64_t> tiles(static_cast<size_t>(grid));
      int64_t total = 0;
      const auto take = [&](int64_t block, int64_t index) {
        const int64_t size = plan.order.at(index).tile + 1;
        tiles[static_cast<size_t>(block)] += size;
        total += size;
      };
      for (int64_t i = 0; i < plan.blocks - pairs; ++i) {
        const int64_t block = i / grid % 2 == 0 ? i % grid : grid - 1 - i % grid;
        take(block, i < pairs ? 2 * i : i + pairs);
        if (i < pairs) take(block, 2 * i + 1);
      }
      const int64_t mean = ceil_div(total, grid);
      const int64_t bound = max<int64_t>(mean, plan.order.tiles);
      EXPECT_LE(*std::max_element(tiles.begin(), tiles.end()), bound + bound / 6)
          << rows << " rows, " << heads << " heads";
    }
  }
}

// In every order, each tile of each head of each sequence comes exactly once.
TEST(PlannerCudaOrder, TheOrderVisitsEveryTileOnce) {
  for (int64_t batch : {1, 3, 30}) {
    for (int64_t heads : {1, 5, 40}) {
      for (int64_t window : {-1, 0}) {
        Problem p = problem(TILEWISE_BFLOAT16, batch, 1000, 3000, heads);
        p.window_right = window;
        const Gradients g = gradients(p);
        for (const Request& request : {Request(p), Request(p, g)}) {
          const cuda::Plan plan = dispatch::plan(request, gpu_with(90)).cuda;
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

// The splits of a tile are neighbours in the grid, as the CTAs of a cluster must be.
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

// In semaphore order a key tile waits for its predecessors, so they have to start first: the key
// tiles of a head start from the first to the last or from the last to the first.
TEST(PlannerCudaOrder, DeterministicKeyTilesStartInSemaphoreOrder) {
  for (int64_t left : {-1, 100}) {
    for (int64_t right : {-1, 0}) {
      Problem p = problem(TILEWISE_BFLOAT16, 2, 1000, 3000, 5);
      p.window_left = left;
      p.window_right = right;
      p.deterministic = 1;
      const Gradients g = gradients(p);
      const cuda::Plan plan = dispatch::plan({p, g}, gpu_with(90)).cuda;
      const bool down = plan.order.longest_tile == cuda::LongestTile::last;
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

// On Hopper the key tiles of as many heads as fill the GPU are interleaved, from the last key tile
// on with a causal mask. Each CTA has one tile. At head dimension 256 causal tiles start from the
// first.
TEST(PlannerCudaOrder, DeterministicKeyTilesOfManyHeadsAreInterleaved) {
  const Device device = gpu_with(90);
  const auto planned = [&](int64_t right, int64_t head_dim) {
    Problem p = problem(TILEWISE_BFLOAT16, 4, 4096, 4096, 16, head_dim);
    p.window_right = right;
    p.deterministic = 1;
    const Gradients g = gradients(p);
    const cuda::Plan plan = dispatch::plan({p, g}, device).cuda;
    EXPECT_EQ(cuda::wgmma::backward_regions({p, g}, plan).tile_counter.bytes, 0u);
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
