// The CUDA planner for the passes with tangents.
#include <gtest/gtest.h>

#include <string>

#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

Decision plan_jvp(const Problem& p, const Device& device, const Tangents& t = kNoTangents) {
  return plan(Request(p, Pass::jvp, kNoGradients, t), device);
}

// The kernel of a jvp, and a sentence about it.
std::string kernel_of_jvp(const Problem& p, const Device& device) {
  return kernel_name(plan_jvp(p, device), Request(p, Pass::jvp, kNoGradients));
}
Decision plan_second(const Problem& p, const Device& device, const Gradients& g = kNoGradients) {
  return plan(Request(p, Pass::second, g), device);
}
std::string why_jvp(const Problem& p, const Device& device, const Tangents& t = kNoTangents) {
  return explain(plan_jvp(p, device, t), Request(p, Pass::jvp, kNoGradients, t), device);
}

TEST(PlannerCudaTangents, ForwardModeHasTheTilesOfAForwardWithAllKeys) {
  const Device device = gpu_with(90);
  Problem p = problem(TILEWISE_FLOAT32, 1, 64);
  p.num_splits = 4;
  const Decision decision = plan_jvp(p, device);
  EXPECT_EQ(kernel_of_jvp(p, device), "cuda.simt.jvp.f32");
  EXPECT_EQ(decision.cuda.splits, 1);
  EXPECT_EQ(decision.cuda.grid, 8);
  EXPECT_EQ(decision.workspace_bytes(), 0);
}

TEST(PlannerCudaTangents, TensorCoresComputeForwardModeInSixteenBits) {
  for (const int32_t sm : {80, 86, 89, 90, 100, 120}) {
    const Device device = gpu_with(sm);
    for (const int32_t dtype : {TILEWISE_FLOAT16, TILEWISE_BFLOAT16}) {
      for (const int64_t head_dim : {8, 64, 72, 128}) {
        Problem p = problem(dtype, 2, 300, 400, 8, head_dim);
        p.num_splits = 4;
        const cuda::Plan plan = plan_jvp(p, device).cuda;
        EXPECT_EQ(kernel_of_jvp(p, device).rfind("cuda.mma_sync.jvp.", 0), 0U) << sm;
        EXPECT_EQ(plan.form, cuda::Form::plain);
        EXPECT_EQ(plan.tile_q, 128);
        EXPECT_EQ(plan.tile_k, head_dim <= 64 ? 48 : 32);
        EXPECT_EQ(plan.splits, 1);
        EXPECT_EQ(plan.blocks, 2 * 8 * 3);
        EXPECT_EQ(plan.nan_recompute != nullptr, dtype == TILEWISE_FLOAT16);  // it may overflow
      }
    }
  }
}

TEST(PlannerCudaTangents, TilesThatANanMayContaminateAreFlagged) {
  Problem p = problem(TILEWISE_BFLOAT16);
  p.window_right = 0;
  const Decision decision = plan_jvp(p, gpu_with(90));
  ASSERT_NE(decision.cuda.nan_recompute, nullptr);
  EXPECT_NE(decision.cuda.nan_recompute->general.jvp.function, nullptr);
  EXPECT_GE(decision.workspace_bytes(), decision.cuda.blocks);
}

TEST(PlannerCudaTangents, TensorCoresComputeSecondDerivativesInSixteenBits) {
  for (const int32_t sm : {80, 86, 90, 120}) {
    const Device device = gpu_with(sm);
    for (const int32_t dtype : {TILEWISE_FLOAT16, TILEWISE_BFLOAT16}) {
      for (const int64_t head_dim : {8, 64, 72, 128}) {
        const Problem p = problem(dtype, 2, 300, 400, 8, head_dim);
        const Decision decision = plan_second(p, device);
        const cuda::Plan& plan = decision.cuda;
        const std::string name = kernel_name(decision, Request(p, Pass::second, kNoGradients));
        EXPECT_EQ(name.rfind("cuda.mma_sync.second.", 0), 0U) << name;
        EXPECT_EQ(plan.form, cuda::Form::plain);
        EXPECT_EQ(plan.tile_q, head_dim <= 64 ? 128 : 64);
        EXPECT_EQ(plan.tile_k, head_dim <= 64 ? 128 : 64);
        EXPECT_EQ(plan.blocks, 2 * 8 * (head_dim <= 64 ? 4 : 7));
        EXPECT_EQ(plan.nan_recompute != nullptr, dtype == TILEWISE_FLOAT16);  // it may overflow
        const int64_t rows = 2 * 8 * (head_dim <= 64 ? 384 : 320);
        EXPECT_GE(decision.workspace_bytes(), 5 * 4 * rows);  // five statistics of fp32
      }
    }
  }
}

TEST(PlannerCudaTangents, SecondDerivativesOnSimtAreNamed) {
  const Problem p = problem(TILEWISE_BFLOAT16);
  const Device device = gpu_with(90);
  float dscale = 0.0f;
  Gradients g{};
  g.dscale = &dscale;
  const Request request(p, Pass::second, g);
  const Decision decision = plan_second(p, device, g);
  EXPECT_EQ(kernel_name(decision, request), "cuda.simt.second.bf16");
  const std::string text = explain(decision, request, device);
  EXPECT_NE(text.find("cuda.mma_sync would be faster, but its second has no gradient of the scale"),
            std::string::npos)
      << text;
  const Problem fp32 = problem(TILEWISE_FLOAT32);
  EXPECT_EQ(kernel_name(plan_second(fp32, device), Request(fp32, Pass::second, kNoGradients)),
            "cuda.simt.second.f32");
}

TEST(PlannerCudaTangents, FewRowsOfAGroupShareATile) {
  Problem p = problem(TILEWISE_BFLOAT16, 3, 16, 500);
  p.heads_kv = 2;
  const cuda::Plan plan = plan_jvp(p, gpu_with(90)).cuda;
  EXPECT_EQ(plan.pack, 4);
  EXPECT_EQ(plan.blocks, 3 * 2);
}

TEST(PlannerCudaTangents, WhatTensorCoresDoNotServeRunsOnSimtAndIsNamed) {
  const auto expect_simt = [](const Problem& p, const Device& device, const std::string& why,
                              const Tangents& t = kNoTangents) {
    const Request request(p, Pass::jvp, kNoGradients, t);
    EXPECT_EQ(kernel_name(plan(request, device), request).rfind("cuda.simt.jvp.", 0), 0U) << why;
    const std::string text = why_jvp(p, device, t);
    EXPECT_NE(text.find("cuda.mma_sync would be faster, but " + why), std::string::npos) << text;
  };
  const Device device = gpu_with(80);
  Problem p = problem(TILEWISE_FLOAT16);
  expect_simt(problem(TILEWISE_FLOAT32), device,
              "it has jvp and second for float16 and bfloat16 alone");
  expect_simt(p, gpu_with(75), "its jvp and second need sm_80");
  expect_simt(problem(TILEWISE_FLOAT16, 1, 64, 64, 8, 136), device,
              "its jvp and second take head dimensions up to 128");
  p.softcap = 5.0f;
  expect_simt(p, device, "its jvp and second take no softcap, ALiBi slopes, bias, dropout or mask");
  p.softcap = 0.0f;
  tilewise_mask mask{};
  mask.struct_size = sizeof(mask);
  p.mask = &mask;
  expect_simt(p, device, "its jvp and second take no softcap, ALiBi slopes, bias, dropout or mask");
  p.mask = nullptr;
  Tangents t{};
  t.k = p.k;
  t.k.data = reinterpret_cast<void*>(8);
  expect_simt(p, device, "its jvp and second need rows", t);
  t.k.data = reinterpret_cast<void*>(16);
  const Request request(p, Pass::jvp, kNoGradients, t);
  EXPECT_EQ(kernel_name(plan(request, device), request), "cuda.mma_sync.jvp.f16");
}

}  // namespace
}  // namespace tilewise::dispatch
