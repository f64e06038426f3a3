// The planner over described devices: the kernel, and the sentence that explains it.
#include "dispatch/planner.h"

#include <gtest/gtest.h>

#include "base/size.h"
#include "described_cuda.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <string>

namespace tilewise::dispatch {
namespace {

using cpu::Isa;

cpu::IsaSet set_of(std::initializer_list<Isa> isas) {
  cpu::IsaSet set;
  for (Isa isa : isas) set = set.with(isa);
  return set;
}

const cpu::IsaSet kEverything =
    set_of({Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx});

Device cpu_with(std::initializer_list<Isa> runnable, int32_t threads = 8) {
  Device device;
  device.cpu.architecture = cpu::Architecture::x86_64;
  device.cpu.compiled = kEverything;
  device.cpu.runnable = set_of(runnable);
  device.cpu.threads = threads;
  return device;
}

const Device kHaswell = cpu_with({Isa::portable, Isa::avx2});
const Device kSkylake = cpu_with({Isa::portable, Isa::avx2, Isa::avx512});
const Device kZen4 = cpu_with({Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16});
const Device kSapphireRapids =
    cpu_with({Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx});

Device arm_with(std::initializer_list<Isa> runnable) {
  Device device;
  device.cpu.architecture = cpu::Architecture::aarch64;
  device.cpu.compiled = set_of({Isa::portable, Isa::neon, Isa::neon_bf16});
  device.cpu.runnable = set_of(runnable);
  return device;
}

const Device kGraviton2 = arm_with({Isa::portable, Isa::neon});
const Device kGrace = arm_with({Isa::portable, Isa::neon, Isa::neon_bf16});

Device without_architecture() {
  Device device;
  device.cpu.architecture = cpu::Architecture::other;
  device.cpu.compiled = device.cpu.runnable = set_of({Isa::portable});
  return device;
}

Device cooper_lake() {
  Device device = kZen4;
  device.cpu.slow_bf16_dot = true;
  return device;
}

Device forced(Device device, Isa isa) {
  device.cpu.forced = isa;
  return device;
}

Problem problem(int32_t dtype, int64_t batch = 1, int64_t rows = 2048, int64_t keys = 2048,
                int64_t heads = 8) {
  Problem p{};
  p.struct_size = sizeof(p);
  p.dtype = dtype;
  p.batch = p.kv_batch = batch;
  p.seqlen_q = rows;
  p.seqlen_k = keys;
  p.heads_q = p.heads_kv = heads;
  p.head_dim = p.head_dim_v = 64;
  p.window_left = p.window_right = -1;
  p.scale = 0.125f;
  return p;
}

struct Answer {
  Decision decision;
  std::string kernel;
  std::string why;
};

Answer ask(const Request& request, const Device& device) {
  const Decision decision = plan(request, device);
  return {decision, kernel_name(decision, request), explain(decision, request, device)};
}

struct Golden {
  const char* machine;
  Device device;
  int32_t dtype;
  const char* kernel;
  const char* why_ends;
};

TEST(Planner, ChoosesAndSaysWhy) {
  const char* const nothing_faster = ": no family of the library is faster for this dtype";
  const Golden cases[] = {
      {"neither x86 nor Arm", without_architecture(), TILEWISE_FLOAT32, "cpu.portable.forward.f32",
       nothing_faster},
      {"Graviton 2", kGraviton2, TILEWISE_FLOAT32, "cpu.neon.forward.f32", nothing_faster},
      {"Graviton 2", kGraviton2, TILEWISE_BFLOAT16, "cpu.neon.forward.bf16",
       ": cpu.neon_bf16 would be faster, but this machine lacks NEON with BF16"},
      {"Grace", kGrace, TILEWISE_FLOAT16, "cpu.neon_bf16.forward.f16", nothing_faster},
      {"Grace", kGrace, TILEWISE_BFLOAT16, "cpu.neon_bf16.forward.bf16", nothing_faster},
      {"Grace, forced", forced(kGrace, Isa::portable), TILEWISE_BFLOAT16,
       "cpu.portable.forward.bf16", ": forced, cpu.neon would be faster"},
      {"Haswell", kHaswell, TILEWISE_FLOAT32, "cpu.avx2.forward.f32",
       ": cpu.avx512 would be faster, but this machine lacks AVX-512 F, BW, DQ and VL"},
      {"Skylake", kSkylake, TILEWISE_FLOAT32, "cpu.avx512.forward.f32", nothing_faster},
      {"Skylake", kSkylake, TILEWISE_BFLOAT16, "cpu.avx512.forward.bf16",
       ": cpu.avx512_bf16 would be faster, but this machine lacks AVX512-BF16"},
      {"Skylake", kSkylake, TILEWISE_FLOAT16, "cpu.avx512.forward.f16",
       ": cpu.amx would be faster, but this machine lacks AMX-TILE and AMX-BF16"},
      {"Zen 4", kZen4, TILEWISE_FLOAT32, "cpu.avx512_bf16.forward.f32", nothing_faster},
      {"Zen 4", kZen4, TILEWISE_BFLOAT16, "cpu.avx512_bf16.forward.bf16",
       ": cpu.amx would be faster, but this machine lacks AMX-TILE and AMX-BF16"},
      {"Cooper Lake", cooper_lake(), TILEWISE_BFLOAT16, "cpu.avx512.forward.bf16",
       ": cpu.amx would be faster, but this machine lacks AMX-TILE and AMX-BF16"},
      {"Sapphire Rapids", kSapphireRapids, TILEWISE_BFLOAT16, "cpu.amx.forward.bf16",
       nothing_faster},
      {"Sapphire Rapids", kSapphireRapids, TILEWISE_FLOAT32, "cpu.amx.forward.f32", nothing_faster},
      {"Sapphire Rapids, forced", forced(kSapphireRapids, Isa::avx2), TILEWISE_BFLOAT16,
       "cpu.avx2.forward.bf16", ": forced, cpu.avx512 would be faster"},
  };
  for (const Golden& golden : cases) {
    const Answer answer = ask(problem(golden.dtype), golden.device);
    EXPECT_EQ(answer.decision.status, TILEWISE_OK);
    EXPECT_EQ(answer.kernel, golden.kernel) << golden.machine;
    ASSERT_NE(answer.decision.family, nullptr);
    EXPECT_TRUE(answer.why.ends_with(golden.why_ends))
        << golden.machine << ": " << answer.why << "\nexpected: " << golden.why_ends;
    EXPECT_LT(answer.why.size(), sizeof(tilewise_plan_info::why));
    EXPECT_LT(answer.kernel.size(), sizeof(tilewise_plan_info::kernel));
    EXPECT_EQ(answer.why.find('\n'), std::string::npos);
  }
}

TEST(Planner, NamesTheBackward) {
  const Gradients gradients{};
  const Answer answer = ask({problem(TILEWISE_FLOAT16), gradients}, kZen4);
  EXPECT_EQ(answer.kernel, "cpu.avx512_bf16.backward.f16");
  EXPECT_GT(answer.decision.cpu.workspace_bytes, 0);
}

// Splits and tiles determine the order of summation, so they follow from shapes and never from the
// threads.
TEST(Planner, ThreadCountChangesOnlyTheScratchMemory) {
  const Gradients gradients{};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (int64_t rows : {1, 100, 2048}) {
      const Problem p = problem(TILEWISE_BFLOAT16, 1, rows, 8192);
      Device one = kZen4;
      one.cpu.threads = 1;
      Device many = kZen4;
      many.cpu.threads = 96;
      const Decision left = plan({p, pass, gradients}, one);
      const Decision right = plan({p, pass, gradients}, many);
      EXPECT_EQ(left.cpu.splits, right.cpu.splits);
      EXPECT_EQ(left.cpu.tile_q, right.cpu.tile_q);
      EXPECT_EQ(left.cpu.tile_k, right.cpu.tile_k);
      EXPECT_EQ(left.family, right.family);
      EXPECT_LE(left.cpu.workspace_bytes, right.cpu.workspace_bytes);
    }
  }
}

// Large items are used if every thread gets at least four of them. The number of rows of an item
// changes which thread computes them, not the result.
TEST(Planner, AmxUsesLargeItemsWhereThereAreEnough) {
  const auto ask_amx = [](const Problem& p, int32_t threads) {
    Device device = kSapphireRapids;
    device.cpu.threads = threads;
    return plan(p, device).cpu;
  };
  const Problem p = problem(TILEWISE_BFLOAT16, 8);
  for (const auto& [threads, rows] : {std::pair{1, 512}, {64, 512}, {65, 256}}) {
    const auto found = ask_amx(p, threads);
    EXPECT_EQ(found.tile_q, rows) << threads;
    EXPECT_EQ(found.tile_k, 256) << threads;
    EXPECT_EQ(found.splits, 1) << threads;
  }
  // With splits: 2 splits of 4 tiles of 2 heads are 16 large items.
  const Problem split = problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 2);
  for (const auto& [threads, rows] : {std::pair{4, 512}, {5, 256}}) {
    EXPECT_EQ(ask_amx(split, threads).splits, 2);
    EXPECT_EQ(ask_amx(split, threads).tile_q, rows) << threads;
  }
}

// Combining splits costs a third of the time of a short prefill.
TEST(Planner, FewTilesAreSplit) {
  for (const auto& [heads, splits] : {std::pair{1, 2}, {4, 2}, {5, 1}, {8, 1}}) {
    const Problem p = problem(TILEWISE_BFLOAT16, 1, 1024, 1024, heads);
    EXPECT_EQ(plan(p, kSapphireRapids).cpu.splits, splits) << heads;
  }
}

TEST(Planner, SplitsKeysWhenThereAreFewRows) {
  EXPECT_EQ(plan(problem(TILEWISE_FLOAT32, 16, 2048, 2048), kZen4).cpu.splits, 1);
  EXPECT_GT(plan(problem(TILEWISE_FLOAT32, 1, 1, 8192, 1), kZen4).cpu.splits, 4);
  Problem asked = problem(TILEWISE_FLOAT32, 1, 1, 8192, 1);
  asked.num_splits = 3;
  EXPECT_EQ(plan(asked, kZen4).cpu.splits, 3);
}

// Few rows use the streaming engine: as many as the vector units process together, or more with
// AMX, where that pays.
TEST(Planner, FewRowsStreamThroughTheCache) {
  const auto engine = [](int32_t dtype, int64_t rows, int64_t keys, int32_t invariant = 0) {
    Problem p = problem(dtype, 1, rows, keys, 16);
    p.heads_kv = 4;
    p.batch_invariant = invariant;
    return std::string(plan(p, kSapphireRapids).cpu.engine);
  };
  EXPECT_EQ(engine(TILEWISE_BFLOAT16, 2, 16), "stream");
  EXPECT_EQ(engine(TILEWISE_BFLOAT16, 8, 256), "stream");
  EXPECT_EQ(engine(TILEWISE_BFLOAT16, 3, 255), "amx");
  EXPECT_EQ(engine(TILEWISE_BFLOAT16, 3, 255, 1), "stream");
  EXPECT_EQ(engine(TILEWISE_BFLOAT16, 9, 8192), "amx");
  EXPECT_EQ(engine(TILEWISE_FLOAT16, 2, 8192), "stream");
  EXPECT_EQ(engine(TILEWISE_FLOAT16, 3, 8192), "amx_split");
}

// The workspace is linear in the sequence length, forward and backward.
TEST(Planner, WorkspaceGrowsLinearly) {
  const Gradients gradients{};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64_t rows = int64_t{1} << 16;
    const int64_t once = plan({problem(TILEWISE_FLOAT32, 1, rows, rows), pass, gradients}, kZen4)
                             .cpu.workspace_bytes;
    const int64_t twice =
        plan({problem(TILEWISE_FLOAT32, 1, 2 * rows, 2 * rows), pass, gradients}, kZen4)
            .cpu.workspace_bytes;
    EXPECT_LE(twice, 2 * once + 4096);
    EXPECT_LT(once, 64 * rows * 8 * 64 * 4);
  }
}

// Sizes as large as validation allows must not wrap around.
TEST(Planner, LargestValidSizesDoNotWrap) {
  const Gradients gradients{};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    Problem p = problem(TILEWISE_FLOAT32, 1, int64_t{1} << 42, int64_t{1} << 42, 1);
    p.head_dim = p.head_dim_v = kMaxHeadDim;
    p.num_splits = 256;
    Device device = kZen4;
    device.cpu.threads = 65536;
    EXPECT_GE(plan({p, pass, gradients}, device).cpu.workspace_bytes, 0);
    p.batch = p.kv_batch = int64_t{1} << 42;
    p.seqlen_q = p.seqlen_k = 1;
    EXPECT_GE(plan({p, pass, gradients}, device).cpu.workspace_bytes, 0);
  }
}

TEST(Planner, DereferencesNoPointer) {
  Problem p = problem(TILEWISE_FLOAT32, 3);
  const Gradients gradients{};
  const auto nowhere = reinterpret_cast<const int32_t*>(uintptr_t{64});
  p.cu_seqlens_q = p.cu_seqlens_k = p.seqused_q = p.seqused_k = p.leftpad_k = nowhere;
  p.bias = p.sinks = p.alibi_slopes = p.scale_ptr = reinterpret_cast<const float*>(nowhere);
  p.dropout_state = reinterpret_cast<const uint64_t*>(nowhere);
  EXPECT_EQ(plan(p, kZen4).status, TILEWISE_OK);
  EXPECT_EQ(plan({p, gradients}, kZen4).status, TILEWISE_OK);
  p.cu_seqlens_k = nullptr;
  p.block_table = nowhere;
  p.block_table_width = p.block_table_stride = 4;
  p.page_size = p.pages = 16;
  EXPECT_EQ(plan(p, kZen4).status, TILEWISE_OK);
  EXPECT_EQ(plan({p, gradients}, kZen4).status, TILEWISE_OK);
}

// Queries of float8 are copied in 16 bits to the start of the workspace.
TEST(Planner, WidensQueriesOfFloat8) {
  Problem p = problem(TILEWISE_FLOAT8_E4M3);
  Problem wide = problem(TILEWISE_BFLOAT16);
  wide.kv_float8 = 1;
  const Answer of_wide = ask(wide, kZen4);
  const int64_t rows = p.batch * p.seqlen_q * p.heads_q;
  const Answer plain = ask(p, kZen4);
  EXPECT_EQ(plain.decision.status, TILEWISE_OK);
  EXPECT_EQ(plain.kernel, "cpu.avx512_bf16.forward.bf16.f8");
  EXPECT_EQ(plain.why, "q of f8 is widened to bf16; " + of_wide.why);
  EXPECT_EQ(plain.decision.workspace_bytes(),
            of_wide.decision.workspace_bytes() + rows * p.head_dim * 2);
  const float one = 1.0f;
  p.q_descale = &one;
  EXPECT_EQ(ask(p, kZen4).decision.workspace_bytes(),
            plain.decision.workspace_bytes() + round_up(p.batch * p.heads_kv * 4, 64));
  p.out_dtype = TILEWISE_OUT_FLOAT16;
  EXPECT_EQ(ask(p, kZen4).kernel, "cpu.avx512_bf16.forward.f16.f8");
  p.out_dtype = TILEWISE_OUT_FLOAT32;
  EXPECT_EQ(ask(p, kZen4).kernel, "cpu.avx512_bf16.forward.bf16.f8");
}

TEST(Planner, RefusesProblemsWithoutAFamily) {
  Problem large = problem(TILEWISE_BFLOAT16);
  large.head_dim = 640;
  const Answer refused = ask(large, kZen4);
  EXPECT_EQ(refused.decision.status, TILEWISE_UNSUPPORTED);
  EXPECT_EQ(refused.decision.family, nullptr);
  EXPECT_EQ(refused.kernel, "");
  EXPECT_EQ(refused.why,
            "device is CPU: no CPU kernel computes a forward in bf16 with head_dim 640; float32, "
            "float16 and bfloat16 up to head_dim 576 are allowed");
  const cuda::Registry nothing{};
  Device hopper;
  hopper.kind = TILEWISE_CUDA;
  hopper.gpu.sm = 90;
  hopper.registry = &nothing;
  const Answer cuda = ask(problem(TILEWISE_BFLOAT16), hopper);
  EXPECT_EQ(cuda.decision.status, TILEWISE_UNSUPPORTED);
  EXPECT_EQ(cuda.why,
            "device is CUDA (sm_90): this build has no CUDA kernel for a forward in bf16 with "
            "head_dim 64; it has no CUDA code; tensors in the memory of the CPU are allowed");
  Problem wide = problem(TILEWISE_FLOAT32);
  wide.head_dim = 576;
  wide.head_dim_v = 512;
  EXPECT_EQ(ask(wide, hopper).why,
            "device is CUDA (sm_90): no CUDA family has a kernel for a forward in f32 with "
            "head_dim 576 and head_dim_v 512; head dimensions up to 512 are allowed, and on a CPU "
            "up to 576");
}

TEST(Families, NamesAreUniqueAndFitTheAbi) {
  std::set<std::string> names;
  const auto check = [&](const FamilyFacts& facts) {
    EXPECT_TRUE(names.insert(facts.name).second) << facts.name;
    EXPECT_LT(std::string(facts.name).size(), sizeof(tilewise_kernel_info::name));
    EXPECT_LT(std::string(facts.requires_).size(), sizeof(tilewise_kernel_info::requires_));
  };
  for (const cpu::FamilyRow& row : families().cpu) {
    check(row.facts);
    EXPECT_EQ(row.facts.name,
              std::string("cpu.") + cpu::kIsaNames[static_cast<std::size_t>(row.isa)]);
  }
  for (const cuda::FamilyRow* row : families().cuda) check(row->facts);
}

// Pages that hold 2^57 keys over all heads, all of which AMX would pack.
TEST(Planner, WorkspaceSizeDoesNotWrap) {
  static constexpr int32_t kTable[] = {0};  // no planner reads it
  Problem p = problem(TILEWISE_BFLOAT16, 1 << 15, 1 << 12, 0);
  p.block_table = kTable;
  p.block_table_width = 1;
  p.page_size = 1 << 27;
  for (const int64_t heads : {1 << 8, 1 << 15}) {
    p.heads_q = p.heads_kv = heads;
    const int64_t bytes = plan(p, kSapphireRapids).cpu.workspace_bytes;
    EXPECT_EQ(bytes < Size::kMax, heads == 1 << 8) << bytes;
    EXPECT_GT(bytes, int64_t{1} << 40);
    EXPECT_LE(bytes, Size::kMax);
  }
}

TEST(Families, FamilyRunsWhereItsRequirementsAreMet) {
  EXPECT_TRUE(can_run(families().of(Isa::amx), kSapphireRapids));
  EXPECT_FALSE(can_run(families().of(Isa::amx), kZen4));
  EXPECT_FALSE(can_run(families().of(Isa::avx2), kGrace));
  const cuda::FamilyRow& simt = cuda::simt::kFamily;
  const cuda::FamilyRow& mma_sync = cuda::mma_sync::kFamily;
  const cuda::FamilyRow& wgmma = cuda::wgmma::kFamily;
  EXPECT_FALSE(can_run(families().of(Isa::portable), gpu_with(90)));
  EXPECT_TRUE(can_run(mma_sync, gpu_with(90)));
  EXPECT_TRUE(can_run(mma_sync, gpu_with(121)));
  EXPECT_TRUE(can_run(simt, gpu_with(75)));
  EXPECT_FALSE(can_run(
      simt, gpu_with(70)));  // the GPU meets the requirement, but the build has no code for it
  EXPECT_FALSE(can_run(mma_sync, kZen4));
  EXPECT_TRUE(can_run(wgmma, gpu_with(90)));
  for (int32_t sm : {89, 100, 121}) EXPECT_FALSE(can_run(wgmma, gpu_with(sm))) << sm;
}

}  // namespace
}  // namespace tilewise::dispatch
