// A family that no GPU has proved (tcgen05): where the planner takes it, and what `why` says.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

// On datacenter Blackwell the planner takes tcgen05 only where unproved families are allowed.
TEST(PlannerCudaUnproved, UnprovedFamiliesAreNamedAndLeftAlone) {
  const Problem p = problem(TILEWISE_BFLOAT16);
  for (int32_t sm : {100, 103}) {
    Device device = gpu_with(sm);
    const Decision off = plan(p, device);
    EXPECT_STREQ(off.family->name, "cuda.mma_sync");
    const std::string why = explain(off, p, device);
    EXPECT_NE(why.find("cuda.tcgen05 is in the library, but not proved on this GPU "
                       "(see tilewise doctor --prove)"),
              std::string::npos)
        << why;
    EXPECT_LT(why.size(), sizeof(tilewise_plan_info::why)) << why;
    device.gpu.takes_unproved = true;
    const Decision on = plan(p, device);
    EXPECT_STREQ(on.family->name, "cuda.tcgen05");
    EXPECT_EQ(on.cuda.architecture, 1001);
    EXPECT_NE(on.cuda.nan_recompute, nullptr);
  }
  for (int32_t sm : {80, 90, 110, 120}) {
    Device device = gpu_with(sm);
    device.gpu.takes_unproved = true;
    const Decision other = plan(p, device);
    EXPECT_STRNE(other.family->name, "cuda.tcgen05");
    EXPECT_EQ(explain(other, p, device).find("tcgen05"), std::string::npos);
  }
}

TEST(PlannerCudaUnproved, ProofsTurnTilesOfAFamilyOn) {
  const std::vector<cuda::Proof> proofs = {{.family = "cuda.tcgen05", .head_dims = {64, 128}}};
  Device device = gpu_with(100);
  device.gpu.proofs = proofs;
  const auto family = [&](int32_t head_dim) {
    return plan(problem(TILEWISE_BFLOAT16, 2, 1024, 1024, 8, head_dim), device).family->name;
  };
  EXPECT_STREQ(family(64), "cuda.tcgen05");
  EXPECT_STREQ(family(96), "cuda.mma_sync");
  EXPECT_STREQ(family(128), "cuda.tcgen05");
  const Problem slower = problem(TILEWISE_BFLOAT16, 2, 1024, 1024, 8, 96);
  const std::string why = explain(plan(slower, device), slower, device);
  EXPECT_NE(why.find("cuda.tcgen05 was not faster on this GPU for head_dim 96"), std::string::npos)
      << why;
  const Problem on = problem(TILEWISE_BFLOAT16, 2, 1024, 1024, 8, 64);
  const std::string proved = explain(plan(on, device), on, device);
  EXPECT_NE(proved.find("it has proved itself on this GPU"), std::string::npos) << proved;
  EXPECT_LT(max(why.size(), proved.size()), sizeof(tilewise_plan_info::why));
}

TEST(PlannerCudaUnproved, WhyHasTheReasonAgainstTcgen05) {
  Device device = gpu_with(100);
  device.gpu.takes_unproved = true;
  const auto expect = [&](const Request& request, const char* reason) {
    const Decision decision = plan(request, device);
    ASSERT_NE(decision.family, nullptr);
    EXPECT_STREQ(decision.family->name, "cuda.mma_sync");
    const std::string why = explain(decision, request, device);
    EXPECT_NE(why.find(reason), std::string::npos) << why;
    EXPECT_LT(why.size(), sizeof(tilewise_plan_info::why)) << why;
  };
  const Problem good = problem(TILEWISE_BFLOAT16);
  const Gradients g = gradients(good);
  expect(Request(good, g), "cuda.tcgen05 is allowed, but it has no backward");
  expect(problem(TILEWISE_BFLOAT16, 16, 64, 2048), "needs more rows: its tiles have 256 rows");
  expect(problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 8, 192), "its largest head_dim is 128");
  Problem softcap = good;
  softcap.softcap = 5.0;
  expect(softcap, "it has no softcap");
  Problem splits = good;
  splits.num_splits = 2;
  expect(splits, "one CTA computes all keys of a tile");
  Problem invariant = good;
  invariant.batch_invariant = 1;
  expect(invariant, "batch_invariant needs one kernel for all lengths");
}

}  // namespace
}  // namespace tilewise::dispatch
