// The CUDA planner for sizes larger than any memory. Validation accepts them, so no arithmetic may
// overflow before there is a plan or an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

// Grids and kernels count CTAs in 31 bits.
TEST(PlannerCudaSizes, PlanSaysWhenAGridIsTooLarge) {
  const auto planned = [](Problem p, bool backward, int32_t sm) {
    p.window_right = 0;
    const Gradients g = gradients(p);
    return plan(backward ? Request(p, g) : Request(p), gpu_with(sm)).cuda;
  };
  for (const int32_t sm : {75, 80, 90, 120}) {
    for (const int32_t dtype : {TILEWISE_FLOAT16, TILEWISE_FLOAT32}) {
      for (const bool backward : {false, true}) {
        const int64_t rows = backward ? 1024 : 1;
        const cuda::Plan most = planned(problem(dtype, INT32_MAX, 1, 1, 1), false, sm);
        EXPECT_TRUE(most.can_be_launched());
        EXPECT_EQ(most.grid, INT32_MAX);
        for (const int64_t heads : {2, 1 << 11}) {
          const Problem p = problem(dtype, INT32_MAX, rows, 2, heads);
          const cuda::Plan more = planned(p, backward, sm);
          EXPECT_FALSE(more.can_be_launched()) << sm << " " << dtype << " " << heads;
          EXPECT_GE(more.grid, INT32_MAX * heads);
          EXPECT_EQ(more.workspace_bytes, 0);
        }
        // No rows and no keys need no CTA, even with a huge batch and many heads.
        const cuda::Plan none = planned(problem(dtype, INT32_MAX, 0, 0, 1 << 11), backward, sm);
        EXPECT_TRUE(none.can_be_launched());
        EXPECT_EQ(none.blocks, 0);
      }
      Problem split = problem(dtype, 1 << 13, 1, 1 << 16, 1 << 11);
      split.num_splits = 256;
      EXPECT_FALSE(planned(split, false, sm).can_be_launched());
      split.num_splits = 1;
      EXPECT_TRUE(planned(split, false, sm).can_be_launched());
    }
  }
}

// Pages hold 2^63 keys times heads, and the bytes of their tiles exceed 64 bits.
TEST(PlannerCudaSizes, TilesOfPagesDoNotOverflow) {
  Problem p = paged(TILEWISE_BFLOAT16, 1 << 21);
  p.batch = p.heads_q = p.heads_kv = 1 << 21;
  p.block_table_width = 1;
  const Gradients g = gradients(p);
  const cuda::Plan backward = plan({p, g}, gpu_with(90)).cuda;
  EXPECT_FALSE(backward.can_be_launched());
  EXPECT_GE(backward.grid, int64_t{1} << 55);
}

const int32_t kIndexArray[] = {0};  // the planner reads no index array

constexpr auto kOptions = std::to_array<void (*)(Problem&)>({
    [](Problem&) {},
    [](Problem& p) { p.seqused_k = kIndexArray; },
    [](Problem& p) { p.window_right = 0; },
    [](Problem& p) { p.seqused_k = kIndexArray, p.window_right = 0; },
    [](Problem& p) { p.window_left = p.window_right = 1000; },
    [](Problem& p) { p.batch_invariant = 1; },
    [](Problem& p) { p.num_splits = 256; },
    [](Problem& p) { p.deterministic = 1; },
});

// Plans for GPUs with and without TMA. The UBSan build detects overflows.
void expect_sane_plans(const Problem& plain) {
  const Gradients g = gradients(plain);
  for (const auto& option : kOptions) {
    Problem p = plain;
    option(p);
    for (const int32_t sm : {75, 90}) {
      for (const bool backward : {false, true}) {
        const cuda::Plan planned = plan(backward ? Request(p, g) : Request(p), gpu_with(sm)).cuda;
        const bool sane = planned.workspace_bytes >= 0 && planned.grid >= 0 && planned.blocks >= 0;
        ASSERT_TRUE(sane) << p.batch << " " << p.heads_q << " " << p.seqlen_q << " "
                          << key_capacity(p) << " sm_" << sm << (backward ? " backward" : "");
      }
    }
  }
}

// Sizes as powers of two, and which of them capi/validate_attention.cpp accepts together.
struct Magnitudes {
  int batch, heads, rows, keys;

  bool are_uniform() const { return batch + heads + rows <= 42 && batch + heads + keys <= 42; }
  bool are_varlen() const { return heads + rows <= 42 && heads + keys <= 42; }
  bool are_paged() const {
    return are_varlen() && batch + heads + rows <= 42 && batch + keys <= 42;
  }

  Problem problem() const {
    return dispatch::problem(TILEWISE_BFLOAT16, int64_t{1} << batch, int64_t{1} << rows,
                             int64_t{1} << keys, int64_t{1} << heads);
  }
};

void expect_sane_plans(const Magnitudes& m) {
  if (m.batch + m.heads > 42) return;
  if (m.are_uniform()) expect_sane_plans(m.problem());
  if (m.are_varlen()) {
    Problem p = m.problem();
    p.cu_seqlens_q = p.cu_seqlens_k = kIndexArray;
    expect_sane_plans(p);
    p.max_seqlen_q = p.max_seqlen_k = 1;
    expect_sane_plans(p);
  }
  if (!m.are_paged()) return;
  for (const int size : {0, 4, 21}) {
    Problem p = m.problem();
    p.block_table = kIndexArray;
    p.page_size = int64_t{1} << std::min(m.keys, size);
    p.block_table_width = p.block_table_stride = p.seqlen_k / p.page_size;
    p.seqlen_k = 0;
    p.pages = 1;
    for (tilewise_tensor* t : {&p.k, &p.v}) t->stride_batch = p.page_size * t->stride_row;
    expect_sane_plans(p);
  }
}

TEST(PlannerCudaSizes, NoMagnitudeOverflows) {
  constexpr std::array kMagnitudes = {0, 3, 7, 14, 21, 30, 36, 42};
  for (const int batch : kMagnitudes) {
    for (const int heads : kMagnitudes) {
      if (batch > 30 || heads > 30) continue;  // batch and heads have 31 bits
      for (const int rows : kMagnitudes) {
        for (const int keys : kMagnitudes) expect_sane_plans(Magnitudes{batch, heads, rows, keys});
      }
    }
  }
}

}  // namespace
}  // namespace tilewise::dispatch
