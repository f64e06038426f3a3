// Sizes of structs, the last error, the tilewise_parallel hook, and the queries about the library.
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "capi_support.h"

namespace capi_test {
namespace {

TEST(StructSize, NewerCallerWithoutNewOptionsIsServed) {
  Call call;
  std::vector<unsigned char> newer(sizeof(tilewise_attention) + 64, 0);
  call.a.struct_size = static_cast<uint32_t>(newer.size());
  std::memcpy(newer.data(), &call.a, sizeof(call.a));
  const auto* attention = reinterpret_cast<const tilewise_attention*>(newer.data());
  EXPECT_EQ(tilewise_forward(attention, call.workspace_data, call.workspace_bytes), TILEWISE_OK)
      << tilewise_last_error();
}

TEST(StructSize, PlanForANewerCallerKeepsItsExtraFields) {
  Call call;
  struct Newer {
    tilewise_plan_info info;
    int64_t later;
  } newer{};
  newer.info.struct_size = sizeof(newer);
  newer.later = 42;
  EXPECT_EQ(tilewise_plan(&call.a, nullptr, TILEWISE_PASS_FORWARD, &newer.info), TILEWISE_OK);
  EXPECT_EQ(newer.info.struct_size, sizeof(newer));
  EXPECT_EQ(newer.later, 42);
  EXPECT_NE(newer.info.kernel[0], '\0');
}

TEST(LastError, IsEmptyAfterASuccess) {
  Call call;
  call.a.heads_q = 3;
  EXPECT_NE(call.forward(), TILEWISE_OK);
  EXPECT_STRNE(tilewise_last_error(), "");
  call.a.heads_q = Call::Hq;
  EXPECT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
  EXPECT_STREQ(tilewise_last_error(), "");
}

TEST(LastError, BelongsToItsThread) {
  Call call;
  call.a.heads_q = 3;
  EXPECT_NE(call.forward(), TILEWISE_OK);
  std::string error_of_other = "not set";
  std::thread([&] { error_of_other = tilewise_last_error(); }).join();
  EXPECT_EQ(error_of_other, "");
  EXPECT_STRNE(tilewise_last_error(), "");
}

struct Hook {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> tasks{0};
  int64_t workers = 1;

  static void parallel_for(void* user, int64_t tasks, tilewise_task task, void* context) {
    auto& hook = *static_cast<Hook*>(user);
    ++hook.calls;
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int64_t w = 0; w < hook.workers; ++w) {
      threads.emplace_back([&] {
        for (int64_t i; (i = next++) < tasks;) {
          task(context, i);
          ++hook.tasks;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

bool same_bytes(const Output& left, const Output& right) {
  return std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0;
}

// Causal attention that is large enough for several threads: 300 rows, 4 query heads that share 2
// key/value heads, D = 32.
struct LargeCall {
  static constexpr int64_t S = 300, Hq = 4, Hkv = 2, D = 32;
  std::vector<float> q = pattern(S * Hq * D, 0.1f), k = pattern(S * Hkv * D, 0.2f);
  std::vector<float> v = pattern(S * Hkv * D, 0.3f), dout = pattern(S * Hq * D, 0.4f);
  std::vector<float> bias = pattern(Hq * S * S, 0.5f), sinks = pattern(Hq, 0.6f);
  Output out{S * Hq * D}, lse{Hq * S}, dq{S * Hq * D}, dk{S * Hkv * D}, dv{S * Hkv * D};
  Output dbias{Hq * S * S}, dsinks{Hq}, dscale{1};
  tilewise_attention a{};
  tilewise_gradients g{};

  LargeCall() {
    a.struct_size = sizeof(a);
    a.batch = 1;
    a.seqlen_q = a.seqlen_k = S;
    a.heads_q = Hq;
    a.heads_kv = Hkv;
    a.head_dim = D;
    a.q = {q.data(), 0, Hq * D, D};
    a.k = {k.data(), 0, Hkv * D, D};
    a.v = {v.data(), 0, Hkv * D, D};
    a.out = {out.data(), 0, Hq * D, D};
    a.lse = lse.data();
    a.lse_stride_head = S;
    a.window_left = -1;
    a.scale = 0.2f;
    a.bias = bias.data();
    a.bias_stride_head = S * S;
    a.bias_stride_row = S;
    a.sinks = sinks.data();
    g.struct_size = sizeof(g);
    g.dout = {dout.data(), 0, Hq * D, D};
    g.dq = {dq.data(), 0, Hq * D, D};
    g.dk = {dk.data(), 0, Hkv * D, D};
    g.dv = {dv.data(), 0, Hkv * D, D};
    g.dbias = dbias.data();
    g.dbias_stride_head = S * S;
    g.dbias_stride_row = S;
    g.dbias_keys = g.dbias_rows = S;
    g.dsinks = dsinks.data();
    g.dscale = dscale.data();
  }

  void run(const tilewise_parallel* parallel) {
    a.parallel = parallel;
    tilewise_plan_info info{};
    info.struct_size = sizeof(info);
    ASSERT_EQ(tilewise_plan(&a, nullptr, TILEWISE_PASS_FORWARD, &info), TILEWISE_OK);
    const Scratch forward(static_cast<std::size_t>(info.workspace_bytes));
    ASSERT_EQ(tilewise_forward(&a, forward.data(), forward.size()), TILEWISE_OK)
        << tilewise_last_error();
    ASSERT_EQ(tilewise_plan(&a, &g, TILEWISE_PASS_BACKWARD, &info), TILEWISE_OK);
    EXPECT_TRUE(parallel == nullptr || info.threads == parallel->threads);
    const Scratch backward(static_cast<std::size_t>(info.workspace_bytes));
    ASSERT_EQ(tilewise_backward(&a, &g, backward.data(), backward.size()), TILEWISE_OK)
        << tilewise_last_error();
  }
};

// Results do not depend on the threads that run the tasks, nor on their order or number.
TEST(Hook, RunsTheTasksAndChangesNoBit) {
  LargeCall reference;
  reference.run(nullptr);
  for (int32_t threads : {1, 2, 3, 7}) {
    Hook hook;
    hook.workers = threads;
    const tilewise_parallel parallel = {&Hook::parallel_for, &hook, threads, 0};
    LargeCall call;
    call.run(&parallel);
    EXPECT_TRUE(threads == 1 || hook.calls > 0) << "the hook was not called";
    EXPECT_GE(hook.tasks, hook.calls);
    for (auto output : {&LargeCall::out, &LargeCall::lse, &LargeCall::dq, &LargeCall::dk,
                        &LargeCall::dv, &LargeCall::dbias, &LargeCall::dsinks, &LargeCall::dscale})
      EXPECT_TRUE(same_bytes(call.*output, reference.*output)) << threads << " threads";
  }
}

// Several threads of a program may call at the same time.
TEST(Threads, CallsDoNotDisturbEachOther) {
  Call reference;
  ASSERT_EQ(reference.forward(), TILEWISE_OK);
  std::vector<std::thread> threads;
  std::atomic<int> different{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int repetition = 0; repetition < 10; ++repetition) {
        Call call;
        if (call.forward() != TILEWISE_OK || !same_bytes(call.out, reference.out)) ++different;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

// The forward compared with the definition in double precision.
TEST(Forward, IsAttention) {
  Call call;
  call.a.window_right = 0;
  call.use_sinks();
  ASSERT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
  for (int64_t b = 0; b < Call::B; ++b)
    for (int64_t h = 0; h < Call::Hq; ++h)
      for (int64_t i = 0; i < Call::Sq; ++i) {
        const int64_t kv = h / (Call::Hq / Call::Hkv);
        double sum = std::exp(static_cast<double>(call.sinks[static_cast<std::size_t>(h)]));
        double out[Call::Dv] = {};
        for (int64_t j = 0; j <= i + Call::Sk - Call::Sq; ++j) {
          const float* q = call.q.data() + ((b * Call::Sq + i) * Call::Hq + h) * Call::D;
          const float* k = call.k.data() + ((b * Call::Sk + j) * Call::Hkv + kv) * Call::D;
          const float* v = call.v.data() + ((b * Call::Sk + j) * Call::Hkv + kv) * Call::Dv;
          double dot = 0;
          for (int64_t d = 0; d < Call::D; ++d) dot += static_cast<double>(q[d]) * k[d];
          const double p = std::exp(call.scale * dot);
          sum += p;
          for (int64_t d = 0; d < Call::Dv; ++d) out[d] += p * v[d];
        }
        const int64_t row = (b * Call::Sq + i) * Call::Hq + h;
        for (int64_t d = 0; d < Call::Dv; ++d)
          EXPECT_NEAR(call.out[static_cast<std::size_t>(row * Call::Dv + d)], out[d] / sum, 1e-6);
        EXPECT_NEAR(call.lse[static_cast<std::size_t>((b * Call::Hq + h) * Call::Sq + i)],
                    std::log(sum), 1e-6);
      }
}

// The planned workspace is sufficient, and no byte beyond it is written.
TEST(Workspace, PlannedSizeIsSufficient) {
  Call call;
  call.use_bias();
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(call.plan(TILEWISE_PASS_BACKWARD, &info), TILEWISE_OK);
  ASSERT_EQ(tilewise_forward(&call.a, call.workspace_data, call.workspace_bytes), TILEWISE_OK);
  Call again;
  again.use_bias();
  ASSERT_EQ(tilewise_forward(&again.a, again.workspace_data, again.workspace_bytes), TILEWISE_OK);
  std::memset(again.workspace.data(), kPoison, static_cast<std::size_t>(again.workspace.size()));
  ASSERT_EQ(tilewise_backward(&again.a, &again.g, again.workspace_data, info.workspace_bytes),
            TILEWISE_OK)
      << tilewise_last_error();
  for (int64_t i = info.workspace_bytes; i < again.workspace.size(); ++i)
    ASSERT_EQ(again.workspace.data()[i], kPoison) << "byte " << i << " past the workspace";
}

TEST(Facts, VersionsAgreeWithTheHeader) {
  EXPECT_STREQ(tilewise_version(), TILEWISE_VERSION_STRING);
  EXPECT_EQ(tilewise_abi_version(), static_cast<uint32_t>(TILEWISE_ABI_VERSION));
  const std::string from_parts = std::to_string(TILEWISE_VERSION_MAJOR) + "." +
                                 std::to_string(TILEWISE_VERSION_MINOR) + "." +
                                 std::to_string(TILEWISE_VERSION_PATCH);
  EXPECT_STREQ(TILEWISE_VERSION_STRING, from_parts.c_str());
  EXPECT_GE(tilewise_cpu_threads(), 1);
}

TEST(Facts, CudaVersionsAreThoseOfABuildWithCuda) {
  tilewise_cuda_code_info code{};
  code.struct_size = sizeof(code);
  int32_t runtime = -1, driver = -1;
  tilewise_cuda_versions(&runtime, &driver);
  tilewise_cuda_versions(nullptr, nullptr);
  if (tilewise_cuda_code(0, &code) == TILEWISE_OK)
    EXPECT_GE(runtime, 12010);
  else
    EXPECT_EQ(runtime, 0);
  EXPECT_GE(driver, 0);
  EXPECT_TRUE(driver == 0 || runtime > 0);
}

TEST(Queries, ProofsAreChecked) {
  const int32_t head_dims[] = {64, 128};
  tilewise_proof proof{};
  EXPECT_EQ(tilewise_set_proof(nullptr), TILEWISE_INVALID_ARGUMENT);
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  expect_message("proof.struct_size is 0");
  proof.struct_size = sizeof(proof);
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  expect_message("proof.family is NULL: a name is needed");
  proof.family = "cuda.simt";
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  expect_message("proof.gpu_name is NULL: a name is needed");
  proof.gpu_name = "no GPU of this name";
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  expect_message(
      "proof.family is \"cuda.simt\": it must be one of the families that are not proved: "
      "cuda.tcgen05");
  proof.family = "cuda.tcgen05";
  proof.head_dims_count = 2;
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  expect_message("proof.head_dims is NULL");
  proof.head_dims = head_dims;
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_OK);
  proof.head_dims_count = -1;
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_INVALID_ARGUMENT);
  proof.head_dims_count = 0;
  EXPECT_EQ(tilewise_set_proof(&proof), TILEWISE_OK);
}

struct IsaRow {
  std::string name;
  bool available;
};

std::vector<IsaRow> instruction_sets() {
  std::vector<IsaRow> rows;
  int32_t available = -1;
  for (int32_t i = 0; const char* name = tilewise_cpu_isa(i, &available); ++i)
    rows.push_back({name, available == 1});
  return rows;
}

TEST(InstructionSets, FirstOneRunsAnywhere) {
  const std::vector<IsaRow> rows = instruction_sets();
  ASSERT_FALSE(rows.empty());
  EXPECT_EQ(rows.front().name, "portable");
  EXPECT_TRUE(rows.front().available);
  EXPECT_EQ(tilewise_cpu_isa(-1, nullptr), nullptr);
  EXPECT_EQ(tilewise_cpu_isa(static_cast<int32_t>(rows.size()), nullptr), nullptr);
  EXPECT_STREQ(tilewise_cpu_isa(0, nullptr), "portable");
}

TEST(InstructionSets, EachAvailableOneCanBeForced) {
  Call call;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  for (const IsaRow& row : instruction_sets()) {
    if (!row.available) {
      EXPECT_EQ(tilewise_select_cpu(row.name.c_str()), TILEWISE_INVALID_ARGUMENT);
      expect_message("name is \"" + row.name + "\": this machine lacks ");
      continue;
    }
    ASSERT_EQ(tilewise_select_cpu(row.name.c_str()), TILEWISE_OK) << tilewise_last_error();
    EXPECT_EQ(tilewise_current_cpu(), row.name);
    ASSERT_EQ(call.plan(TILEWISE_PASS_FORWARD, &info), TILEWISE_OK);
    EXPECT_EQ(std::string(info.kernel), "cpu." + row.name + ".forward.f32");
  }
  EXPECT_EQ(tilewise_select_cpu("z80"), TILEWISE_INVALID_ARGUMENT);
  expect_message(
      "name is \"z80\": no instruction set has this name; on this machine it must be one of "
      "portable");
  EXPECT_EQ(tilewise_select_cpu(nullptr), TILEWISE_OK);
  std::string best;
  for (const IsaRow& row : instruction_sets())
    if (row.available) best = row.name;
  EXPECT_EQ(tilewise_current_cpu(), best);
}

TEST(Matrix, RowsAreCompleteAndListEnds) {
  const std::map<std::string, int32_t> on_gpus = {
      {"cuda.simt", 512}, {"cuda.mma_sync", 256}, {"cuda.wgmma", 256}, {"cuda.tcgen05", 128}};
  const auto largest = [&](const tilewise_kernel_info& row) {
    if (row.device == TILEWISE_CPU) return 576;
    if (row.dtype == TILEWISE_FLOAT8_E4M3) return 192;
    const bool wide = row.dtype == TILEWISE_FLOAT16 || row.dtype == TILEWISE_BFLOAT16;
    const std::string name = row.name;
    const bool latent = wide && (name == "cuda.mma_sync" || name == "cuda.simt");
    return latent ? 576 : on_gpus.at(name);
  };
  std::set<std::string> rows;
  tilewise_kernel_info info{};
  info.struct_size = sizeof(info);
  int32_t index = 0;
  for (; tilewise_kernel(index, &info) == TILEWISE_OK; ++index) {
    EXPECT_TRUE(rows.insert(info.name + std::to_string(info.dtype)).second) << info.name;
    EXPECT_EQ(info.max_head_dim, largest(info)) << info.name << " " << info.dtype;
    EXPECT_NE(info.requires_[0], '\0');
    EXPECT_EQ(info.forward, 1) << info.name;
    EXPECT_EQ(info.proved, std::string(info.name) == "cuda.tcgen05" ? 0 : 1) << info.name;
    const bool forward_alone =
        std::string(info.name) == "cuda.tcgen05" || info.dtype == TILEWISE_FLOAT8_E4M3;
    EXPECT_EQ(info.backward, forward_alone ? 0 : 1) << info.name;
  }
  expect_message("index is " + std::to_string(index) + ": it must be 0 to " +
                 std::to_string(index - 1));
#if defined(__aarch64__)
  constexpr size_t kWithThreeDtypes = 5;  // three instruction sets, simt and mma_sync
#else
  constexpr size_t kWithThreeDtypes = 7;  // five instruction sets of x86-64
#endif
  // wgmma and tcgen05 have no float32, and wgmma has float8.
  EXPECT_EQ(rows.size(), 3 * kWithThreeDtypes + 2 * 2 + 1);
  EXPECT_EQ(tilewise_kernel(-1, &info), TILEWISE_INVALID_ARGUMENT);
  EXPECT_EQ(tilewise_kernel(0, nullptr), TILEWISE_INVALID_ARGUMENT);
  info.struct_size = 1;
  EXPECT_EQ(tilewise_kernel(0, &info), TILEWISE_INVALID_ARGUMENT);
  expect_message("info.struct_size is 1");
}

}  // namespace
}  // namespace capi_test
