// The CUDA planner for described GPUs and builds: family, tile table, form, packing, workspace and
// the `why` texts.
#include <gtest/gtest.h>

#include <string>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

using cuda::Form;

struct Golden {
  int32_t sm;
  int32_t dtype;
  int64_t head_dim;
  const char* forward;
  const char* backward;
  int32_t table;  // of the forward
};

TEST(PlannerCuda, ChoosesFamilyAndTable) {
  // sm, dtype, head dimension, family of the forward and of the backward, tile table
  const Golden cases[] = {
      {60, TILEWISE_FLOAT32, 64, nullptr, nullptr, 0},
      {75, TILEWISE_FLOAT16, 64, "cuda.mma_sync", "cuda.mma_sync", 75},
      {75, TILEWISE_FLOAT16, 256, "cuda.mma_sync", "cuda.simt", 75},
      {75, TILEWISE_BFLOAT16, 64, "cuda.simt", "cuda.simt", 0},
      {75, TILEWISE_FLOAT32, 64, "cuda.simt", "cuda.simt", 0},
      {80, TILEWISE_BFLOAT16, 128, "cuda.mma_sync", "cuda.mma_sync", 80},
      {80, TILEWISE_FLOAT32, 256, "cuda.mma_sync", "cuda.mma_sync", 80},
      {86, TILEWISE_BFLOAT16, 256, "cuda.mma_sync", "cuda.mma_sync", 86},
      {87, TILEWISE_BFLOAT16, 64, "cuda.mma_sync", "cuda.mma_sync", 86},
      {89, TILEWISE_FLOAT16, 96, "cuda.mma_sync", "cuda.mma_sync", 86},
      {90, TILEWISE_FLOAT16, 40, "cuda.wgmma", "cuda.wgmma", 901},
      {90, TILEWISE_FLOAT16, 42, "cuda.mma_sync", "cuda.mma_sync", 90},
      {90, TILEWISE_BFLOAT16, 256, "cuda.wgmma", "cuda.wgmma", 901},
      {90, TILEWISE_FLOAT32, 64, "cuda.mma_sync", "cuda.mma_sync", 90},
      {90, TILEWISE_FLOAT32, 8, "cuda.mma_sync", "cuda.mma_sync", 90},
      {90, TILEWISE_FLOAT32, 7, "cuda.simt", "cuda.simt", 0},
      {75, TILEWISE_FLOAT16, 320, "cuda.simt", "cuda.simt", 0},
      {80, TILEWISE_BFLOAT16, 257, "cuda.mma_sync", "cuda.mma_sync", 80},
      {86, TILEWISE_FLOAT16, 512, "cuda.mma_sync", "cuda.simt", 86},
      {90, TILEWISE_FLOAT16, 512, "cuda.mma_sync", "cuda.mma_sync", 90},
      {90, TILEWISE_FLOAT32, 512, "cuda.simt", "cuda.simt", 0},
      {90, TILEWISE_FLOAT16, 576, "cuda.simt", nullptr, 0},
      {100, TILEWISE_BFLOAT16, 320, "cuda.mma_sync", "cuda.mma_sync", 90},
      {120, TILEWISE_BFLOAT16, 512, "cuda.mma_sync", "cuda.simt", 120},
      {100, TILEWISE_BFLOAT16, 192, "cuda.mma_sync", "cuda.mma_sync", 90},
      {103, TILEWISE_BFLOAT16, 128, "cuda.mma_sync", "cuda.mma_sync", 90},
      {110, TILEWISE_BFLOAT16, 128, "cuda.mma_sync", "cuda.mma_sync", 90},
      {120, TILEWISE_BFLOAT16, 128, "cuda.mma_sync", "cuda.mma_sync", 120},
      {121, TILEWISE_FLOAT32, 128, "cuda.mma_sync", "cuda.mma_sync", 120},
  };
  for (const Golden& golden : cases) {
    const Device device = gpu_with(golden.sm);
    const Problem p = problem(golden.dtype, 1, 2048, 2048, 8, golden.head_dim);
    const Gradients g = gradients(p);
    const std::string what = "sm_" + std::to_string(golden.sm) + " " + short_dtype(golden.dtype) +
                             " head_dim " + std::to_string(golden.head_dim);
    for (const Request& request : {Request(p), Request(p, g)}) {
      const Decision decision = plan(request, device);
      const char* family = request.is(Pass::forward) ? golden.forward : golden.backward;
      const std::string why = explain(decision, request, device);
      EXPECT_LT(why.size(), sizeof(tilewise_plan_info::why)) << why;
      if (family == nullptr) {
        EXPECT_EQ(decision.status, TILEWISE_UNSUPPORTED) << what;
        continue;
      }
      ASSERT_NE(decision.family, nullptr) << what << ": " << why;
      EXPECT_STREQ(decision.family->name, family) << what;
      EXPECT_GE(decision.cuda.head_dim, golden.head_dim) << what;
      if (request.is(Pass::forward)) {
        EXPECT_EQ(decision.cuda.architecture, golden.table) << what;
      }
    }
  }
}

TEST(PlannerCuda, WhyNamesTheKernelAndTheFasterFamily) {
  const auto why = [](const Device& device, const Problem& p) {
    return explain(plan(p, device), p, device);
  };
  EXPECT_EQ(why(gpu_with(90), problem(TILEWISE_BFLOAT16)),
            "bf16 on sm_90, tile 128x128 for head_dim 128 of table sm_90a, plain form: "
            "no family of the library is faster here");
  EXPECT_EQ(why(gpu_with(80), problem(TILEWISE_BFLOAT16, 16)),
            "bf16 on sm_80, tile 128x64 for head_dim 128 of table sm_80, plain form: "
            "no family of the library is faster here");
  EXPECT_EQ(why(gpu_with(90), problem(TILEWISE_BFLOAT16, 16, 2048, 2048, 8, 68)),
            "bf16 on sm_90, tile 128x64 for head_dim 96 of table sm_90, general form: cuda.wgmma "
            "would be faster, but TMA needs rows that start at multiples of 16 bytes and "
            "head dims that are multiples of 8, in float8 of 16");
  EXPECT_EQ(why(gpu_with(75), problem(TILEWISE_BFLOAT16, 16)),
            "bf16 on sm_75, tile 64x64 for head_dim 128: cuda.mma_sync would be faster, but the "
            "tensor cores of sm_75 compute no bf16");
  EXPECT_EQ(why(gpu_with(90), problem(TILEWISE_FLOAT16, 16, 2048, 2048, 8, 320)),
            "f16 on sm_90, tile 64x64 for head_dim 384 of table sm_90, plain form: cuda.wgmma "
            "would be faster, but its largest head_dim is 256");
  EXPECT_EQ(why(gpu_with(75), problem(TILEWISE_FLOAT16, 16, 2048, 2048, 8, 320)),
            "f16 on sm_75, tile 64x64 for head_dim 512: cuda.mma_sync would be faster, but its "
            "kernels for sm_75 take head dimensions up to 256");
  const Problem wide = problem(TILEWISE_FLOAT16, 16, 2048, 2048, 8, 320);
  const Gradients g = gradients(wide);
  EXPECT_NE(explain(plan(Request(wide, g), gpu_with(86)), Request(wide, g), gpu_with(86))
                .find("cuda.mma_sync would be faster, but its backward for GPUs with 99 KB of "
                      "shared memory per CTA takes head dimensions up to 256"),
            std::string::npos);
  EXPECT_EQ(why(gpu_with(90), problem(TILEWISE_FLOAT32, 16, 2048, 2048, 8, 320)),
            "f32 on sm_90, tile 64x64 for head_dim 512: cuda.mma_sync would be faster, but its "
            "largest head_dim is 256");
  EXPECT_NE(why(gpu_with(90), problem(TILEWISE_FLOAT32, 16, 2048, 2048, 8, 7))
                .find("cuda.mma_sync would be faster, but its float32 needs head dimensions of 8"),
            std::string::npos);
  EXPECT_EQ(why(gpu_with(60), problem(TILEWISE_FLOAT32)),
            "device is CUDA (sm_60): this build has no CUDA kernel for a forward in f32 with "
            "head_dim 128; it has SASS of sm_75, sm_80, sm_86, sm_90, sm_100, sm_120 and PTX of "
            "sm_75, sm_80, sm_90; tensors in the memory of the CPU are allowed");
}

// On Hopper, problems that wgmma does not serve run on mma_sync, and `why` has the reason.
TEST(PlannerCuda, WhyHasTheReasonAgainstWgmma) {
  const auto expect = [](const Problem& p, const char* reason, int32_t table = 0) {
    Device device = gpu_with(90);
    device.gpu.table = table;
    const Decision decision = plan(p, device);
    ASSERT_NE(decision.family, nullptr);
    EXPECT_STREQ(decision.family->name, reason == nullptr ? "cuda.wgmma" : "cuda.mma_sync");
    if (reason == nullptr) return;
    const std::string why = explain(decision, p, device);
    EXPECT_NE(why.find(reason), std::string::npos) << why;
    EXPECT_LT(why.size(), sizeof(tilewise_plan_info::why)) << why;
  };
  const Problem good = problem(TILEWISE_BFLOAT16);
  expect(good, nullptr);
  expect(good, "a tile table is forced", 90);
  expect(problem(TILEWISE_BFLOAT16, 16, 64, 2048),
         ": cuda.wgmma needs more rows: its tiles have 64");
  expect(problem(TILEWISE_BFLOAT16, 16, 65, 2048), nullptr);
  const char* kAligned = "multiples of 16 bytes";
  for (tilewise_tensor Problem::* view : {&Problem::q, &Problem::k, &Problem::v, &Problem::out}) {
    Problem p = good;
    (p.*view).stride_row += 4;
    expect(p, kAligned);
    p = good;
    (p.*view).data = reinterpret_cast<void*>(uintptr_t{8});
    expect(p, kAligned);
  }
  Problem expanded = good;
  expanded.q.stride_batch = expanded.k.stride_head = expanded.v.stride_row = 0;
  expect(expanded, nullptr);
  Problem reversed = good;
  reversed.k.stride_head = -reversed.k.stride_head;
  expect(reversed, "strides that are not negative and below 2^40 bytes");
  Problem invariant = good;
  invariant.batch_invariant = 1;
  expect(invariant, "batch_invariant needs one kernel");
  Problem options = good;
  options.softcap = 30.0f;
  options.window_left = 100;
  expect(options, nullptr);
  EXPECT_EQ(forward(options, gpu_with(90)).form, Form::general);
}

// Out in float32 is an option of the general forms. Kernels with tensor cores find no max_logits.
TEST(PlannerCuda, OtherOutputsAreServed) {
  const Device device = gpu_with(90);
  const auto expect = [&](const Request& request, const char* family, const char* reason) {
    const Decision decision = plan(request, device);
    ASSERT_NE(decision.family, nullptr);
    EXPECT_STREQ(decision.family->name, family);
    const std::string why = explain(decision, request, device);
    EXPECT_NE(why.find(reason), std::string::npos) << why;
  };
  Problem wide = problem(TILEWISE_BFLOAT16);
  wide.out_dtype = TILEWISE_OUT_FLOAT32;
  const Gradients g = gradients(wide);
  expect(wide, "cuda.wgmma", "general form");
  expect(Request(wide, g), "cuda.wgmma", "general form");
  EXPECT_EQ(forward(wide, gpu_with(80)).form, Form::general);
  Problem decode = problem(TILEWISE_BFLOAT16, 16, 1, 2048);
  EXPECT_EQ(forward(decode, device).form, Form::tma);
  decode.out_dtype = TILEWISE_OUT_FLOAT32;
  EXPECT_EQ(forward(decode, device).form, Form::general);
  float logits[1];
  Problem with_logits = problem(TILEWISE_BFLOAT16);
  with_logits.max_logits = logits;
  expect(with_logits, "cuda.simt", "it writes no max_logits");
  expect(Request(with_logits, g), "cuda.wgmma", "");
}

// Short sequences, in the backward only causal ones, use the small tiles.
TEST(PlannerCuda, WgmmaTileSizeDependsOnRows) {
  const Device device = gpu_with(90);
  const auto rows = [&](int64_t head_dim, int64_t length, int64_t window_right, bool backward) {
    Problem p = problem(TILEWISE_BFLOAT16, 4, length, length, 8, head_dim);
    p.window_right = window_right;
    const Gradients g = gradients(p);
    return plan(backward ? Request(p, g) : Request(p), device).cuda.tile_q;
  };
  EXPECT_EQ(rows(64, 1024, -1, false), 256);
  EXPECT_EQ(rows(64, 2048, -1, false), 192);
  EXPECT_EQ(rows(128, 512, -1, false), 128);
  EXPECT_EQ(rows(128, 2048, -1, true), 80);
  EXPECT_EQ(rows(128, 2048, 0, true), 64);
  EXPECT_EQ(rows(128, 8192, 0, true), 80);
}

// The machine code of a build for sm_80 runs on sm_86 and sm_89, not on sm_90.
TEST(PlannerCuda, UsesALowerTableIfTheBuildLacksItsOwn) {
  static constexpr int32_t k80[] = {80};
  const DescribedBuild build(
      {{.architecture = 0, .sass = k80, .ptx = {}}, {.architecture = 80, .sass = k80, .ptx = {}}});
  const Problem p = problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 8, 64);
  EXPECT_EQ(forward(p, gpu_with(80, build.registry)).architecture, 80);
  const Device ada = gpu_with(89, build.registry);
  EXPECT_EQ(forward(p, ada).architecture, 80);
  EXPECT_NE(explain(plan(p, ada), p, ada).find("of table sm_80 (its own is not in this build)"),
            std::string::npos);
  EXPECT_EQ(plan(p, gpu_with(90, build.registry)).status, TILEWISE_UNSUPPORTED);
  EXPECT_EQ(plan(p, gpu_with(75, build.registry)).status, TILEWISE_UNSUPPORTED);
}

TEST(PlannerCuda, ForcedTableIsUsedOrRefused) {
  Device device = gpu_with(90);
  const Problem p = problem(TILEWISE_FLOAT16);
  for (int32_t table : {75, 80, 90}) {
    device.gpu.table = table;
    EXPECT_EQ(forced_table_problem(device), "") << table;
    EXPECT_EQ(forward(p, device).architecture, table);
  }
  device.gpu.table = 86;  // machine code of another major version, and no PTX
  EXPECT_EQ(forced_table_problem(device),
            "TILEWISE_FORCE_ARCH is 86: this build has no code of that tile table that a GPU with "
            "sm_90 runs; it has SASS of sm_75, sm_80, sm_86, sm_90, sm_100, sm_120 and PTX of "
            "sm_75, sm_80, sm_90");
  device.gpu.table = 75;
  EXPECT_STREQ(plan(problem(TILEWISE_BFLOAT16), device).family->name, "cuda.simt");
}

TEST(PlannerCuda, Tf32HasToBeRequested) {
  Problem p = problem(TILEWISE_FLOAT32);
  EXPECT_FALSE(forward(p, gpu_with(90)).kernel_set->tf32);
  p.tf32 = 1;
  EXPECT_TRUE(forward(p, gpu_with(90)).kernel_set->tf32);
  const Problem half = [&] {
    Problem other = problem(TILEWISE_FLOAT16);
    other.tf32 = 1;
    return other;
  }();
  EXPECT_FALSE(forward(half, gpu_with(90)).kernel_set->tf32);
}

TEST(PlannerCuda, FastPathNeedsAlignedRowsAndNoOption) {
  const Device device = gpu_with(90);
  const auto form = [](const Problem& p, const Device& on) { return forward(p, on).form; };
  EXPECT_EQ(form(problem(TILEWISE_BFLOAT16), device), Form::plain);
  EXPECT_EQ(form(problem(TILEWISE_BFLOAT16, 1, 100, 100, 8, 72), device), Form::plain);
  EXPECT_EQ(form(problem(TILEWISE_BFLOAT16, 1, 100, 100, 8, 68), device), Form::general);
  EXPECT_EQ(form(problem(TILEWISE_FLOAT32, 1, 100, 100, 8, 68), device), Form::plain);
  Problem p = problem(TILEWISE_BFLOAT16);
  p.softcap = 30.0f;
  EXPECT_EQ(form(p, device), Form::general);
  p = problem(TILEWISE_BFLOAT16);
  p.k.stride_row += 4;
  EXPECT_EQ(form(p, device), Form::general);
  p = problem(TILEWISE_BFLOAT16);
  p.v.data = reinterpret_cast<void*>(uintptr_t{8});
  EXPECT_EQ(form(p, device), Form::general);
  p = problem(TILEWISE_BFLOAT16);
  p.q.stride_batch = 4;  // never used with a batch of one
  EXPECT_EQ(form(p, device), Form::plain);
}

// Decodes of two sequences in pages.
TEST(PlannerCuda, PagedFormServesPagesWithoutOptions) {
  const auto form = [](const Problem& p, int32_t sm) { return forward(p, gpu_with(sm)).form; };
  for (int64_t page_size : {1, 16, 100, 4096}) {
    EXPECT_EQ(form(paged(TILEWISE_BFLOAT16, page_size), 80), Form::paged);
    EXPECT_EQ(form(paged(TILEWISE_FLOAT16, page_size), 75), Form::paged);
    EXPECT_EQ(form(paged(TILEWISE_FLOAT32, page_size), 90), Form::general);
  }
  Problem p = paged(TILEWISE_BFLOAT16, 16);
  p.softcap = 30.0f;
  EXPECT_EQ(form(p, 90), Form::general);
  p = paged(TILEWISE_BFLOAT16, 16);
  p.k.stride_row += 4;
  EXPECT_EQ(form(p, 90), Form::general);
  p = paged(TILEWISE_BFLOAT16, 16);
  p.pages = int64_t{1} << 20;  // 16 GB less one stride: 16-byte pieces are counted in 32 bits
  EXPECT_EQ(form(p, 80), Form::general);
  p.pages = int64_t{1} << 18;
  EXPECT_EQ(form(p, 80), Form::paged);
  const Decision decision = plan(p, gpu_with(80));
  EXPECT_NE(explain(decision, p, gpu_with(80)).find(", paged form"), std::string::npos);
}

TEST(PlannerCuda, DecodesLoadPagesByTmaIfTheyFitTheTile) {
  const auto form = [](const Problem& p, int32_t sm) { return forward(p, gpu_with(sm)).form; };
  struct Fits {
    int64_t page_size;
    bool large;  // tiles of 128 keys (head dimension 64)
    bool usual;  // tiles of 64 keys (128)
    bool small;  // tiles of 32 keys (256)
  };
  for (const Fits& page : {Fits{.page_size = 1, .large = false, .usual = false, .small = false},
                           Fits{.page_size = 8, .large = false, .usual = false, .small = false},
                           Fits{.page_size = 16, .large = true, .usual = true, .small = true},
                           Fits{.page_size = 32, .large = true, .usual = true, .small = true},
                           Fits{.page_size = 48, .large = false, .usual = false, .small = false},
                           Fits{.page_size = 64, .large = true, .usual = true, .small = true},
                           Fits{.page_size = 96, .large = false, .usual = false, .small = true},
                           Fits{.page_size = 100, .large = false, .usual = false, .small = false},
                           Fits{.page_size = 128, .large = true, .usual = true, .small = true},
                           Fits{.page_size = 192, .large = false, .usual = true, .small = true},
                           Fits{.page_size = 256, .large = true, .usual = true, .small = true}}) {
    const auto expected = [](bool fits) { return fits ? Form::tma_paged : Form::paged; };
    const auto of = [&](int64_t head_dim) {
      return form(paged(TILEWISE_BFLOAT16, page.page_size, head_dim), 90);
    };
    EXPECT_EQ(of(64), expected(page.large)) << page.page_size;
    EXPECT_EQ(of(128), expected(page.usual)) << page.page_size;
    EXPECT_EQ(of(256), expected(page.small)) << page.page_size;
  }
  EXPECT_EQ(form(paged(TILEWISE_FLOAT16, 16), 100), Form::tma_paged);
  EXPECT_EQ(form(paged(TILEWISE_FLOAT16, 16), 120), Form::paged);
  Problem p = paged(TILEWISE_BFLOAT16, 16);
  p.batch_invariant = 1;
  EXPECT_EQ(form(p, 90), Form::tma_paged);
  p.pages = int64_t{1} << 20;  // no such limit with TMA
  EXPECT_EQ(form(p, 90), Form::tma_paged);
  p.leftpad_k = p.block_table;  // key 0 may be anywhere in its page
  EXPECT_EQ(form(p, 90), Form::general);
  p = paged(TILEWISE_BFLOAT16, 16);
  p.leftpad_k = p.block_table;
  EXPECT_EQ(form(p, 90), Form::paged);
  p = paged(TILEWISE_BFLOAT16, 16);
  p.v.stride_head = 0;  // one head for all
  EXPECT_EQ(form(p, 90), Form::tma_paged);
  p.v.stride_head = -128;  // no tensor map has such a stride
  EXPECT_EQ(form(p, 90), Form::paged);
  p = paged(TILEWISE_BFLOAT16, 16);
  p.seqlen_q = 40;
  EXPECT_EQ(form(p, 90), Form::paged);
  p = paged(TILEWISE_BFLOAT16, 16);
  const Decision decision = plan(p, gpu_with(90));
  EXPECT_NE(explain(decision, p, gpu_with(90)).find("paged TMA form"), std::string::npos);
}

TEST(PlannerCuda, DecodesLoadKeysByTmaIfStridesAllow) {
  const auto form = [](const Problem& p, int32_t sm) { return forward(p, gpu_with(sm)).form; };
  const Problem decode = problem(TILEWISE_BFLOAT16, 2, 1, 4096);
  EXPECT_EQ(form(decode, 90), Form::tma);
  EXPECT_EQ(form(decode, 100), Form::tma);
  EXPECT_EQ(form(decode, 80), Form::plain);
  EXPECT_EQ(form(problem(TILEWISE_FLOAT32, 2, 1, 4096), 90), Form::plain);
  EXPECT_EQ(form(problem(TILEWISE_BFLOAT16, 2, 40, 4096), 90), Form::plain);
  Problem p = decode;
  p.softcap = 30.0f;
  EXPECT_EQ(form(p, 90), Form::general);
  p = decode;
  p.k.stride_batch = 0;  // one cache for all
  EXPECT_EQ(form(p, 90), Form::tma);
  p.k.stride_batch = -4096;
  EXPECT_EQ(form(p, 90), Form::general);
  const Decision decision = plan(decode, gpu_with(90));
  EXPECT_NE(explain(decision, decode, gpu_with(90)).find("TMA form"), std::string::npos);
}

// CTAs find their tiles without a table, which would take another launch to fill.
TEST(PlannerCuda, SequencesOfOneTileNeedNoTable) {
  static constexpr int32_t kOffsets[] = {0, 1, 2, 3, 4};  // the planner reads no index array
  Problem p = problem(TILEWISE_BFLOAT16, 4, 4, 4096);
  p.cu_seqlens_q = kOffsets;
  const auto table = [&] {
    return cuda::forward_workspace(p, forward(p, gpu_with(90))).table.bytes;
  };
  p.max_seqlen_q = 1;
  EXPECT_EQ(table(), 0);
  p.seqlen_q = 4000;
  p.max_seqlen_q = 1000;
  EXPECT_GT(table(), 0);
}

TEST(PlannerCuda, FewRowsPackTheHeadsOfAGroup) {
  const Device device = gpu_with(90);
  Problem p = problem(TILEWISE_BFLOAT16, 1, 1, 8192, 32);
  p.heads_kv = 4;
  const cuda::Plan decode = forward(p, device);
  EXPECT_EQ(decode.pack, 8);
  EXPECT_EQ(decode.splits, 16);
  EXPECT_EQ(decode.cluster_size, 16);
  EXPECT_EQ(decode.blocks, 4 * decode.splits);
  p.seqlen_q = 2048;
  EXPECT_EQ(forward(p, device).pack, 1);
  p.heads_kv = 32;
  p.seqlen_q = 1;
  EXPECT_EQ(forward(p, device).pack, 1);
}

// A dense problem without a mask is one launch and needs no workspace, except four bytes per warp
// for wgmma, which recomputes rows whose exponentials overflow.
TEST(PlannerCuda, FastPathForwardNeedsNoWorkspace) {
  const cuda::Plan ampere = forward(problem(TILEWISE_BFLOAT16, 16), gpu_with(80));
  EXPECT_EQ(ampere.workspace_bytes, 0);
  EXPECT_EQ(ampere.nan_recompute, nullptr);
  const cuda::Plan hopper = forward(problem(TILEWISE_BFLOAT16, 16), gpu_with(90));
  EXPECT_EQ(hopper.workspace_bytes, hopper.blocks * hopper.tile_q / 16 * 4);
  EXPECT_EQ(hopper.nan_recompute, nullptr);
}

// A mask inside a tile adds a flag per CTA and a recompute pass; wgmma recomputes in the same
// kernel, with four bytes per warp.
TEST(PlannerCuda, MasksNeedANanRecompute) {
  Problem p = problem(TILEWISE_BFLOAT16, 16);
  p.window_right = 0;
  const Device device = gpu_with(80);
  const cuda::Plan causal = forward(p, device);
  ASSERT_NE(causal.nan_recompute, nullptr);
  EXPECT_EQ(causal.nan_recompute->family, &cuda::simt::kFamily);
  EXPECT_EQ(causal.workspace_bytes, round_up(causal.blocks, 64));
  const cuda::Plan hopper = forward(p, gpu_with(90));
  EXPECT_EQ(hopper.nan_recompute, nullptr);
  EXPECT_EQ(hopper.workspace_bytes, round_up(hopper.blocks * hopper.tile_q / 16 * 4, 64));
  p.window_right = 2047;  // the first row sees the last key
  EXPECT_EQ(forward(p, device).nan_recompute, nullptr);
  p.window_left = 2046;  // the last row does not see the first key
  EXPECT_NE(forward(p, device).nan_recompute, nullptr);
  p.window_left = 2047;
  EXPECT_EQ(forward(p, device).nan_recompute, nullptr);
  p.seqlen_q = 1;
  p.window_left = -1;
  p.window_right = 0;
  EXPECT_EQ(forward(p, device).nan_recompute, nullptr);
  p.window_left = 100;  // the window starts inside a tile
  EXPECT_NE(forward(p, device).nan_recompute, nullptr);
}

TEST(PlannerCuda, VarlenGridIsBoundedByRows) {
  Problem p = problem(TILEWISE_BFLOAT16, 64, 16384, 16384);
  const auto nowhere = reinterpret_cast<const int32_t*>(uintptr_t{64});
  p.cu_seqlens_q = p.cu_seqlens_k = nowhere;
  const cuda::Plan plan = forward(p, gpu_with(90));
  EXPECT_EQ(plan.blocks, (16384 / 128 + 64) * 8 * plan.splits);
  p.max_seqlen_q = 100;
  EXPECT_EQ(forward(p, gpu_with(90)).blocks % (64 * 8), 0);
  const Gradients g = gradients(p);
  const cuda::Plan backward = dispatch::plan({p, g}, gpu_with(90)).cuda;
  EXPECT_EQ(backward.blocks, (16384 / backward.tile_k + 64) * 8);
}

// The workspace of the backward is linear in the length.
TEST(PlannerCuda, WorkspaceGrowsLinearly) {
  const auto bytes = [&](int64_t length) {
    const Problem p = problem(TILEWISE_BFLOAT16, 1, length, length);
    const Gradients g = gradients(p);
    return plan({p, g}, gpu_with(90)).cuda.workspace_bytes;
  };
  EXPECT_GT(bytes(65536), 0);
  EXPECT_LE(bytes(131072), 2 * bytes(65536) + 4096);
}

}  // namespace
}  // namespace tilewise::dispatch
