// The CUDA planner for the passes with tangents.
#include <gtest/gtest.h>

#include <string>

#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

TEST(PlannerCudaTangents, ForwardModeHasTheTilesOfAForwardWithAllKeys) {
  const Device device = gpu_with(90);
  Problem p = problem(TILEWISE_BFLOAT16, 1, 64);
  p.num_splits = 4;
  const Request request(p, Pass::jvp, kNoGradients);
  const Decision decision = plan(request, device);
  EXPECT_EQ(kernel_name(decision, request), "cuda.simt.jvp.bf16");
  EXPECT_EQ(decision.cuda.splits, 1);
  EXPECT_EQ(decision.cuda.grid, 8);
  EXPECT_EQ(decision.workspace_bytes(), 0);
  const std::string why = explain(decision, request, device);
  EXPECT_NE(why.find("cuda.mma_sync would be faster, but it has no jvp"), std::string::npos) << why;
}

}  // namespace
}  // namespace tilewise::dispatch
