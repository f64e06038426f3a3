// A new family is a folder (toy_family) and a line in the list: planner, explanations, kernel names
// and launches then know it.
#include <algorithm>
#include <vector>

#include "described_cuda.h"
#include "planned_cuda.h"
#include "toy_family/family.h"

namespace tilewise::dispatch {
namespace {

// The library with the family in its list, and a build with its kernels for sm_100.
Device gpu_with_toy(int32_t sm) {
  static const std::vector<const cuda::FamilyRow*> rows = [] {
    std::vector<const cuda::FamilyRow*> all(families().cuda.begin(), families().cuda.end());
    all.push_back(&cuda::toy::kFamily);
    return all;
  }();
  static const Families with_toy = {.cpu = families().cpu, .cuda = rows};
  static const std::vector<const cuda::KernelSet*> kernel_sets = [] {
    std::vector<const cuda::KernelSet*> all(every_gpu().kernel_sets.begin(),
                                            every_gpu().kernel_sets.end());
    all.push_back(&cuda::toy::kKernels);
    return all;
  }();
  static constexpr int32_t kSass[] = {100};
  static const std::vector<cuda::Code> code = [] {
    std::vector<cuda::Code> all(every_gpu().code.begin(), every_gpu().code.end());
    all.push_back({.architecture = cuda::toy::kKernels.architecture, .sass = kSass, .ptx = {}});
    return all;
  }();
  static const cuda::Registry registry = {.kernel_sets = kernel_sets, .code = code};
  Device device = gpu_with(sm, registry);
  device.families = &with_toy;
  return device;
}

Problem toy_problem() { return problem(TILEWISE_BFLOAT16, 3, 2048, 2048, 8, 64); }

TEST(PlannerToyFamily, ServesWhatItsRowSays) {
  const Device device = gpu_with_toy(100);
  const Problem p = toy_problem();
  const Decision decision = plan(p, device);
  ASSERT_EQ(decision.status, TILEWISE_OK);
  EXPECT_EQ(decision.cuda_row, &cuda::toy::kFamily);
  EXPECT_EQ(kernel_name(decision, p), "cuda.toy.forward.bf16");
  EXPECT_EQ(explain(decision, p, device),
            "bf16 on sm_100, tile 128x128 for head_dim 64 of table sm_100a, plain form: no family "
            "of the library is faster here");
  EXPECT_TRUE(can_run(cuda::toy::kFamily, device));
  EXPECT_FALSE(can_run(cuda::toy::kFamily, gpu_with_toy(90)));
}

TEST(PlannerToyFamily, IsLaunchedThroughItsRow) {
  const Problem p = toy_problem();
  char workspace = 0;
  launch(plan(p, gpu_with_toy(100)), p, &workspace, {});
  EXPECT_EQ(cuda::toy::last_launch.batch, 3);
  EXPECT_EQ(cuda::toy::last_launch.workspace, &workspace);
}

TEST(PlannerToyFamily, LeavesTheRestToTheOthersAndSaysWhy) {
  const Device device = gpu_with_toy(100);
  const auto expect = [&](const Request& request, const char* why) {
    const Decision decision = plan(request, device);
    ASSERT_EQ(decision.status, TILEWISE_OK);
    EXPECT_STREQ(decision.family->name, "cuda.mma_sync");
    const std::string text = explain(decision, request, device);
    EXPECT_NE(text.find(why), std::string::npos) << text;
  };
  const Problem p = toy_problem();
  const Gradients g = gradients(p);
  expect({p, g}, "cuda.toy would be faster, but it has no backward");
  Problem dropout = p;
  dropout.dropout_p = 0.5f;
  expect(dropout, "cuda.toy would be faster, but it has no dropout");
}

// Another family of the list recomputes the tiles that the toy family flags.
TEST(PlannerToyFamily, HasItsFlaggedTilesRecomputed) {
  Problem p = toy_problem();
  EXPECT_EQ(forward(p, gpu_with_toy(100)).nan_recompute, nullptr);
  p.window_right = 0;
  const cuda::Plan causal = forward(p, gpu_with_toy(100));
  ASSERT_NE(causal.nan_recompute, nullptr);
  EXPECT_NE(causal.nan_recompute->family->recompute_kernels, nullptr);
}

TEST(PlannerToyFamily, DoesNotChangeOtherGpus) {
  const Problem p = toy_problem();
  const Decision with = plan(p, gpu_with_toy(90));
  const Decision without = plan(p, gpu_with(90));
  EXPECT_STREQ(with.family->name, without.family->name);
  EXPECT_EQ(explain(with, p, gpu_with_toy(90)), explain(without, p, gpu_with(90)));
}

}  // namespace
}  // namespace tilewise::dispatch
