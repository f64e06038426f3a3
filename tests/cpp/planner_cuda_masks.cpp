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
        EXPECT_EQ(plan.kernel_set->family, &cuda::mma_sync::kFamily) << sm;
        EXPECT_EQ(plan.form, cuda::Form::masked) << sm;
        EXPECT_NE(plan.nan_recompute, nullptr);  // a mask hides keys inside a tile
      }
      p = with_mask(problem(TILEWISE_FLOAT32, 2, rows, 2048));
      EXPECT_EQ(forward(p, gpu_with(sm)).kernel_set->family, &cuda::simt::kFamily) << sm;
    }
  }
}

TEST(PlannerCudaMasks, WhyNamesTheFamilyThatReadsNoMask) {
  EXPECT_EQ(explained(with_mask(problem(TILEWISE_BFLOAT16, 4)), gpu_with(90)),
            "bf16 on sm_90, tile 128x64 for head_dim 128 of table sm_90, masked form: cuda.wgmma "
            "would be faster, but it reads no mask");
  EXPECT_EQ(explained(with_mask(problem(TILEWISE_FLOAT32)), gpu_with(90)),
            "f32 on sm_90, tile 64x64 for head_dim 128: cuda.mma_sync would be faster, but it "
            "reads a mask only with keys of 16 or 8 bits");
}

}  // namespace
}  // namespace tilewise::dispatch
