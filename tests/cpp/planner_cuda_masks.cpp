// Kernels for problems with a mask.
#include <gtest/gtest.h>

#include <string>

#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

constexpr tilewise_mask kMask{};

Problem with_mask(Problem p) {
  p.mask = &kMask;
  return p;
}

std::string explained(const Problem& p, const Device& device) {
  return explain(plan(p, device), p, device);
}

TEST(PlannerCudaMasks, TensorCoresServeKeysOf16And8Bits) {
  for (const int32_t sm : {75, 80, 86, 90, 100, 120}) {
    for (const int64_t rows : {1, 2048}) {
      Problem p = with_mask(problem(TILEWISE_FLOAT16, 2, rows, 2048));
      for (const int32_t float8 : {0, 1}) {
        p.kv_float8 = float8;
        const cuda::Plan plan = forward(p, gpu_with(sm));
        const bool wgmma = sm == 90 && rows > 1 && float8 == 0;
        EXPECT_EQ(plan.kernel_set->family, wgmma ? &cuda::wgmma::kFamily : &cuda::mma_sync::kFamily)
            << sm;
        EXPECT_EQ(plan.form, cuda::Form::masked) << sm;
        // A mask hides keys inside a tile; wgmma recomputes contaminated rows itself.
        EXPECT_EQ(plan.nan_recompute == nullptr, wgmma);
      }
      p = with_mask(problem(TILEWISE_FLOAT32, 2, rows, 2048));
      EXPECT_EQ(forward(p, gpu_with(sm)).kernel_set->family, &cuda::simt::kFamily) << sm;
    }
  }
}

// The masked form of wgmma is a forward without score options that takes one tile at a time from a
// counter, because tiles differ in what they see.
TEST(PlannerCudaMasks, HopperHasAMaskedForward) {
  Problem p = with_mask(problem(TILEWISE_BFLOAT16, 4));
  for (const int64_t head_dim : {64, 96, 128}) {
    const cuda::Plan plan =
        forward(with_mask(problem(TILEWISE_BFLOAT16, 4, 2048, 2048, 8, head_dim)), gpu_with(90));
    EXPECT_EQ(plan.kernel_set->family, &cuda::wgmma::kFamily);
    EXPECT_EQ(plan.form, cuda::Form::masked);
    EXPECT_EQ(plan.splits, 1);
    EXPECT_FALSE(plan.stream_k.any());
  }
  p.window_right = 0;
  const cuda::Plan causal = forward(p, gpu_with(90));
  EXPECT_EQ(causal.order.paired_tiles, 0);
  EXPECT_TRUE(causal.dynamic_scheduling);
}

// Up to head dim 64, the tile of few rows and of masks of blocks is a block; ranges at more rows
// have the tile of the other forms.
TEST(PlannerCudaMasks, HopperHasATileForBlocks) {
  tilewise_mask mask{};
  for (const int32_t kind : {TILEWISE_MASK_RANGES, TILEWISE_MASK_BLOCKS}) {
    mask.kind = kind;
    for (const int64_t head_dim : {40, 64, 96, 128}) {
      for (const int64_t rows : {1024, 2048, 2049, 8192}) {
        Problem p = problem(TILEWISE_BFLOAT16, 4, rows, rows, 8, head_dim);
        p.mask = &mask;
        const cuda::Plan plan = forward(p, gpu_with(90));
        const bool blocks = kind == TILEWISE_MASK_BLOCKS || rows <= 2048;
        EXPECT_EQ(plan.kernel_set->family, &cuda::wgmma::kFamily);
        EXPECT_EQ(plan.tile_q, head_dim > 64 || blocks ? 128 : 192) << rows;
        EXPECT_EQ(plan.tile_k, 128);
      }
    }
  }
}

// That of the backward has tiles of 64 queries, or of 128 at head dim 64, for all numbers of rows.
TEST(PlannerCudaMasks, HopperHasAMaskedBackward) {
  for (const int64_t head_dim : {64, 96, 128}) {
    for (const int64_t rows : {1, 2048, 16384}) {
      Problem p = with_mask(problem(TILEWISE_BFLOAT16, 4, rows, rows, 8, head_dim));
      for (const int32_t deterministic : {0, 1}) {
        p.deterministic = deterministic;
        const cuda::Plan backward = plan(Request(p, gradients(p)), gpu_with(90)).cuda;
        EXPECT_EQ(backward.kernel_set->family, &cuda::wgmma::kFamily);
        EXPECT_EQ(backward.form, cuda::Form::masked);
        EXPECT_EQ(backward.tile_q, head_dim == 64 ? 128 : 64);
        EXPECT_NE(backward.nan_recompute, nullptr);
        EXPECT_EQ(backward.order.longest_tile, cuda::LongestTile::first);
      }
    }
  }
  Problem p = with_mask(problem(TILEWISE_BFLOAT16, 4));
  p.softcap = 5.0f;
  const Decision other = plan(Request(p, gradients(p)), gpu_with(90));
  EXPECT_EQ(other.cuda.kernel_set->family, &cuda::mma_sync::kFamily);
}

TEST(PlannerCudaMasks, WhyNamesTheFamilyThatReadsNoMask) {
  const auto hopper = [](Problem p) { return explained(with_mask(p), gpu_with(90)); };
  const std::string mma_sync =
      "bf16 on sm_90, tile 128x64 for head_dim 128 of table sm_90, masked form: cuda.wgmma ";
  Problem p = problem(TILEWISE_BFLOAT16, 4);
  p.softcap = 5.0f;
  EXPECT_EQ(hopper(p), mma_sync +
                           "would be faster, but beside a mask it has no score option, pages "
                           "or out in float32");
  p = problem(TILEWISE_BFLOAT16, 4);
  p.batch_invariant = 1;
  EXPECT_EQ(hopper(p), mma_sync +
                           "would be faster, but batch_invariant needs one kernel for all "
                           "lengths");
  EXPECT_NE(hopper(problem(TILEWISE_BFLOAT16, 4, 2048, 2048, 8, 192))
                .find("cuda.wgmma would be faster, but it reads a mask with head dims up to 128"),
            std::string::npos);
  for (const int64_t batch : {1, 2})  // 128 rows and 2048 keys in too few tiles, or in packed heads
    EXPECT_NE(hopper(problem(TILEWISE_BFLOAT16, batch, 128)).find("neither packs heads nor splits"),
              std::string::npos);
  EXPECT_EQ(explained(with_mask(problem(TILEWISE_FLOAT32)), gpu_with(90)),
            "f32 on sm_90, tile 64x64 for head_dim 128: cuda.mma_sync would be faster, but it "
            "reads a mask only with keys of 16 or 8 bits");
}

}  // namespace
}  // namespace tilewise::dispatch
