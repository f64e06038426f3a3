// How the CUDA planner serves latent caches (MLA): family, tile table, tile and splits.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

// A decode of a latent cache (MLA): one key/value head, whose first 512 columns are the values.
Problem latent(int64_t heads, int64_t batch = 1, int64_t keys = 16384, int64_t rows = 1) {
  Problem p = problem(TILEWISE_BFLOAT16, batch, rows, keys, heads, 576);
  p.heads_kv = 1;
  p.head_dim_v = 512;
  p.k = p.v = {nullptr, keys * 576, 576, 576};
  p.out = {nullptr, rows * heads * 512, heads * 512, 512};
  return p;
}

TEST(PlannerCudaLatent, LatentCachesHaveKernelsOfTheirOwn) {
  for (const auto& [sm, table] : {std::pair{80, 80}, {86, 86}, {90, 90}, {100, 90}, {120, 120}}) {
    const Decision decision = plan(latent(16), gpu_with(sm));
    EXPECT_STREQ(decision.family->name, "cuda.mma_sync") << sm;
    EXPECT_EQ(decision.cuda.architecture, table);
    EXPECT_EQ(decision.cuda.head_dim, 576);
    EXPECT_EQ(decision.cuda.tile_q, 16);
    EXPECT_EQ(decision.cuda.pack, 16);
  }
  EXPECT_EQ(forward(latent(128), gpu_with(90)).tile_q, 64);
  EXPECT_EQ(forward(latent(16, 1, 4096, 4), gpu_with(90)).tile_q, 64);
  const Device turing = gpu_with(75);
  EXPECT_STREQ(plan(latent(16), turing).family->name, "cuda.simt");
  const auto runs_on_simt = [](const Problem& p, const char* reason) {
    const Decision decision = plan(p, gpu_with(80));
    EXPECT_STREQ(decision.family->name, "cuda.simt");
    EXPECT_NE(explain(decision, p, gpu_with(80)).find(reason), std::string::npos) << reason;
  };
  Problem p = latent(16);
  p.v.stride_row = 512;
  runs_on_simt(p, "values that are the first 512 columns");
  p = latent(16);
  p.softcap = 5.0f;
  runs_on_simt(p, "take no softcap");
}

// Few tiles are split into as many keys as pay for their partial results of 512 columns.
TEST(PlannerCudaLatent, LatentCachesAreSplit) {
  const Device device = gpu_with(90);
  EXPECT_GT(forward(latent(16), device).splits, 100);
  EXPECT_LE(forward(latent(16), device).splits, 128);
  EXPECT_GE(forward(latent(128), device).splits, 48);  // two tiles of 64 rows
  EXPECT_EQ(forward(latent(128, 64), device).splits, 1);
}

}  // namespace
}  // namespace tilewise::dispatch
