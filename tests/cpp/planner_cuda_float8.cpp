// Kernels and splits for caches of float8_e4m3.
#include <gtest/gtest.h>

#include <string>

#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

Problem with_float8(Problem p) {
  p.kv_float8 = 1;
  return p;
}

std::string explained(const Problem& p, const Device& device) {
  return explain(plan(p, device), p, device);
}

// Queries may be fp16 or bf16 on every GPU with tensor cores, even on those without bf16 products:
// keys and values are converted to fp16, and the products are computed in it.
TEST(PlannerCudaFloat8, MmaSyncServesFloat8Caches) {
  for (const int32_t sm : {75, 80, 86, 89, 90, 100, 120}) {
    for (const int32_t dtype : {TILEWISE_FLOAT16, TILEWISE_BFLOAT16}) {
      for (const int64_t head_dim : {8, 64, 72, 128, 192, 256}) {
        const Problem p = with_float8(problem(dtype, 2, 1, 1000, 8, head_dim));
        const Device device = gpu_with(sm);
        const Decision decision = plan(p, device);
        ASSERT_EQ(decision.status, TILEWISE_OK);
        EXPECT_STREQ(decision.family->name, "cuda.mma_sync") << sm << ": " << explained(p, device);
        EXPECT_EQ(decision.cuda.architecture, cuda::arch::limits_of(sm).table);
        EXPECT_EQ(decision.cuda.head_dim, head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256);
      }
    }
  }
  EXPECT_EQ(forward(with_float8(problem(TILEWISE_BFLOAT16, 1, 1, 1000, 8, 320)), gpu_with(90))
                .kernel_set->family,
            &cuda::simt::kFamily);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16), gpu_with(75)).kernel_set->family,
            &cuda::simt::kFamily);
}

TEST(PlannerCudaFloat8, DecodesLoadByTmaIfTheLayoutAllows) {
  const auto form = [](Problem p, int32_t sm = 90) {
    return forward(with_float8(p), gpu_with(sm)).form;
  };
  const Problem plain = problem(TILEWISE_BFLOAT16, 2, 1, 4096);
  EXPECT_EQ(form(plain), cuda::Form::tma);
  EXPECT_EQ(form(plain, 80), cuda::Form::general);
  EXPECT_EQ(form(problem(TILEWISE_FLOAT16, 2, 1, 4096, 8, 80)), cuda::Form::tma);
  // A row of 72 float8 elements is not a multiple of 16 bytes, although 72 elements of 16 bits are.
  EXPECT_EQ(form(problem(TILEWISE_FLOAT16, 2, 1, 4096, 8, 72)), cuda::Form::general);
  Problem p = plain;
  p.k.stride_row += 8;  // bytes
  EXPECT_EQ(form(p), cuda::Form::general);
  p = plain;
  p.softcap = 30.0f;
  EXPECT_EQ(form(p), cuda::Form::general);
  p = plain;
  p.v.stride_head = 0;
  EXPECT_EQ(form(p), cuda::Form::tma);
  p.v.stride_head = -128;
  EXPECT_EQ(form(p), cuda::Form::general);
  for (const int64_t page : {16, 32, 64, 128, 256})
    EXPECT_EQ(form(paged(TILEWISE_BFLOAT16, page)), cuda::Form::tma_paged) << page;
  for (const int64_t page : {1, 8})
    EXPECT_EQ(form(paged(TILEWISE_BFLOAT16, page)), cuda::Form::general) << page;
  EXPECT_EQ(form(paged(TILEWISE_BFLOAT16, 64), 120), cuda::Form::general);
}

TEST(PlannerCudaFloat8, PromptsDoNotUseWgmma) {
  const Problem p = with_float8(problem(TILEWISE_BFLOAT16, 16, 1024, 4096));
  EXPECT_EQ(explained(p, gpu_with(90)),
            "bf16 on sm_90, tile 128x64 for head_dim 128 of table sm_90, general form: cuda.wgmma "
            "would be faster, but TMA does not convert float8");
}

// The plan is that of the 16-bit copy of the queries, which lies before the rest of the workspace.
TEST(PlannerCudaFloat8, QueriesAreWidened) {
  Problem p = problem(TILEWISE_FLOAT8_E4M3, 4, 33, 1000, 8, 72);
  const Decision decision = plan(p, gpu_with(90));
  const Problem wide = with_float8(problem(TILEWISE_BFLOAT16, 4, 33, 1000, 8, 72));
  const Decision of_wide = plan(wide, gpu_with(90));
  ASSERT_EQ(decision.status, TILEWISE_OK);
  EXPECT_EQ(decision.cuda.kernel_set, of_wide.cuda.kernel_set);
  EXPECT_EQ(decision.cuda.form, of_wide.cuda.form);
  EXPECT_EQ(decision.workspace_bytes(), of_wide.workspace_bytes() + 4 * 33 * 8 * 72 * 2);
  EXPECT_EQ(kernel_name(decision, p), "cuda.mma_sync.forward.bf16.f8");
  EXPECT_EQ(explained(p, gpu_with(90)),
            "q of f8 is widened to bf16; " + explained(wide, gpu_with(90)));
  // Likewise where a family that never reads float8 queries is the faster one.
  EXPECT_EQ(
      explained(problem(TILEWISE_FLOAT8_E4M3, 2, 100, 1000, 8, 320), gpu_with(90)),
      "q of f8 is widened to bf16; " +
          explained(with_float8(problem(TILEWISE_BFLOAT16, 2, 100, 1000, 8, 320)), gpu_with(90)));
}

// Where products in float8 have a kernel, queries are not widened. Its workspace begins with no
// copy of q, and has the transposed values: two sequences of 1000 keys, padded to 1024.
TEST(PlannerCudaFloat8, HopperMultipliesInFloat8) {
  const Device device = gpu_with(90);
  for (const int64_t head_dim : {64, 128}) {
    const Problem p = problem(TILEWISE_FLOAT8_E4M3, 2, 1000, 1000, 8, head_dim);
    const Decision decision = plan(p, device);
    ASSERT_EQ(decision.status, TILEWISE_OK);
    EXPECT_EQ(kernel_name(decision, p), "cuda.wgmma.forward.f8") << explained(p, device);
    EXPECT_EQ(decision.cuda.form, cuda::Form::plain);
    EXPECT_EQ(decision.q_bytes, 0);
    EXPECT_EQ(decision.cuda.value_bytes, 2 * 8 * head_dim * 1024);
    EXPECT_EQ(kernel_name(plan(p, gpu_with(100)), p), "cuda.mma_sync.forward.bf16.f8");
  }
}

TEST(PlannerCudaFloat8, OtherCallsWithFloat8QueriesSayWhyTheyAreWidened) {
  const Problem p = problem(TILEWISE_FLOAT8_E4M3, 2, 1000, 1000);
  const auto reason = [](const Problem& changed) {
    const std::string text = explained(changed, gpu_with(90));
    EXPECT_EQ(text.find("q of f8 is widened to bf16; bf16 on sm_90, "), 0u) << text;
    return text.substr(text.find(": ") + 2);
  };
  const std::string faster = "cuda.wgmma would be faster, but ";
  const std::string options =
      faster + "for float8 it has no score option, mask, pages or out in float32";
  Problem changed = p;
  changed.softcap = 5.0f;
  EXPECT_EQ(reason(changed), options);
  changed = p;
  changed.out_dtype = TILEWISE_OUT_FLOAT32;
  EXPECT_EQ(reason(changed), options);
  changed = p;
  changed.heads_q = 16;
  changed.seqlen_q = 256;
  EXPECT_EQ(reason(changed),
            "cuda.wgmma needs more rows in float8: it then neither packs heads nor splits keys");
  EXPECT_EQ(reason(problem(TILEWISE_FLOAT8_E4M3, 2, 1000, 1000, 8, 256)),
            faster + "its largest head_dim is 192");
  EXPECT_EQ(reason(problem(TILEWISE_FLOAT8_E4M3, 2, 1000, 1000, 8, 192)),
            faster + "its tiles of float8 have at most 128 columns of values");
}

// The registry of this test has no kernel set for float8.
TEST(PlannerCudaFloat8, SimtServesBuildsWithoutFloat8Kernels) {
  std::vector<const cuda::KernelSet*> kernel_sets;
  for (const cuda::KernelSet* kernel_set : every_gpu().kernel_sets)
    if (kernel_set->dtype != TILEWISE_FLOAT8_E4M3) kernel_sets.push_back(kernel_set);
  cuda::Registry registry = every_gpu();
  registry.kernel_sets = kernel_sets;
  const Device device = gpu_with(90, registry);
  const Problem p = with_float8(problem(TILEWISE_BFLOAT16, 1, 1, 1024));
  EXPECT_EQ(forward(p, device).kernel_set->family, &cuda::simt::kFamily);
  EXPECT_NE(explained(p, device).find("cuda.mma_sync would be faster, but it has no tile"),
            std::string::npos);
}

// A warp needs more instructions per byte of float8 keys, so three CTAs per SM are needed to
// saturate memory, where two are enough for 16-bit keys.
TEST(PlannerCudaFloat8, DecodesUseMoreCtas) {
  const Device device = gpu_with(90);
  const int64_t sms = device.gpu.sm_count;
  for (const int64_t batch : {1, 4, 8, 16, 24}) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 1, 32768, 32);
    p.heads_kv = 8;
    const cuda::Plan half = forward(p, device);
    const cuda::Plan float8 = forward(with_float8(p), device);
    EXPECT_FALSE(float8.one_cta_per_sm);
    EXPECT_LE(half.blocks, 2 * sms);
    EXPECT_GT(float8.blocks, half.blocks) << batch;
    EXPECT_LE(float8.blocks, 3 * sms) << batch;
    EXPECT_EQ(float8.tile_k, 128);
  }
}

}  // namespace
}  // namespace tilewise::dispatch
