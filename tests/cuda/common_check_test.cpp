// The index check: the GPU reports the same sentence about the same entry as the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "call.h"
#include "capi/refusal.h"
#include "capi/validate.h"
#include "cuda/common/kernels.h"
#include "cuda/launch.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::Call;

std::string cpu_sentence(const tilewise::Problem& p) {
  try {
    tilewise::capi::check_index_arrays(p);
  } catch (const tilewise::capi::Refusal& refusal) {
    return refusal.sentence;
  }
  return "";
}

std::string gpu_sentence(const tilewise::Request& request) {
  tilewise::IndexFault report;
  std::memset(static_cast<void*>(&report), 0x5a, sizeof(report));
  try {
    tilewise::cuda::check_entries(request, &report);
  } catch (const tilewise::cuda::InvalidArgument& argument) {
    return argument.what();
  }
  return "";
}

// Changes one entry of one of the call's arrays.
void damage(Call<float>& call) {
  struct Array {
    std::vector<int32_t>* entries;
    int64_t count;
  };
  std::vector<Array> arrays;
  const auto& p = call.p;
  const auto add = [&](const int32_t* used, std::vector<int32_t>& entries, int64_t count) {
    if (used != nullptr && count > 0) arrays.push_back({&entries, count});
  };
  add(p.cu_seqlens_q, call.cu_q, p.batch + 1);
  add(p.cu_seqlens_k, call.cu_k, p.batch + 1);
  add(p.seqused_q, call.used_q, p.batch);
  add(p.seqused_k, call.used_k, p.batch);
  add(p.leftpad_k, call.leftpad, p.batch);
  add(p.kv_batch_idx, call.index, p.batch);
  add(p.block_table, call.table, p.batch * p.block_table_stride);
  if (arrays.empty()) return;
  const Array& array =
      arrays[static_cast<size_t>(call.random.between(0, static_cast<int64_t>(arrays.size()) - 1))];
  int32_t& entry = (*array.entries)[static_cast<size_t>(call.random.between(0, array.count - 1))];
  entry = call.random.pick<int32_t>({-1, entry - 1, entry + 1, entry + 50, 1 << 30, -(1 << 30)});
}

TEST(CommonCheck, FindsWhatTheCpuFinds) {
  int64_t faults = 0, valid = 0;
  for (uint32_t seed = 0; seed < 700; ++seed) {
    Call<float> call(seed, {20, 20, 8, seed % 3 == 0 ? 40 : 4});
    if (tilewise::has_uniform_sequences(call.p)) continue;
    ASSERT_EQ(gpu_sentence(call.p), "") << "seed " << seed;
    for (int64_t i = call.random.between(0, 3); i > 0; --i) damage(call);
    if (call.random.rarely()) call.p.max_seqlen_q = call.random.between(1, 25);
    if (call.random.rarely()) call.p.max_seqlen_k = call.random.between(1, 25);
    const std::string expected = cpu_sentence(call.p);
    ASSERT_EQ(gpu_sentence(call.p), expected) << "seed " << seed;
    (expected.empty() ? valid : faults) += 1;
  }
  EXPECT_GT(faults, 150);
  EXPECT_GT(valid, 150);
}

// With pages, lengths that exceed the block table are errors of cu_seqlens_k.
TEST(CommonCheck, LengthsOfPages) {
  std::vector<int32_t> cu = {0, 4, 20}, table = {0, 1, 2, 3};
  tilewise::Problem p{};
  p.batch = 2;
  p.page_size = 5;
  p.block_table_width = p.block_table_stride = 2;
  p.pages = 4;
  p.block_table = table.data();
  p.cu_seqlens_k = cu.data();
  EXPECT_NE(cpu_sentence(p), "");
  EXPECT_EQ(gpu_sentence(p), cpu_sentence(p));
  cu[2] = 14;
  EXPECT_EQ(gpu_sentence(p), "");
  table[3] = 4;
  EXPECT_NE(cpu_sentence(p), "");
  EXPECT_EQ(gpu_sentence(p), cpu_sentence(p));
  cu[2] = 9;  // the last page is no longer in use
  EXPECT_EQ(gpu_sentence(p), "");
}

TEST(CommonCheck, ManySequencesAndPages) {
  tilewise::Problem p{};
  p.batch = 1200;
  p.page_size = 2;
  p.block_table_width = p.block_table_stride = 70;
  p.pages = 9;
  std::vector<int32_t> table(static_cast<size_t>(p.batch * 70), 3), used(1200, 139);
  p.block_table = table.data();
  p.seqused_k = used.data();
  EXPECT_EQ(gpu_sentence(p), "");
  table[70 * 900 + 69] = 9;
  table[70 * 900 + 68] = -1;
  table[70 * 1100] = -1;
  EXPECT_NE(cpu_sentence(p), "");
  EXPECT_EQ(gpu_sentence(p), cpu_sentence(p));
  used[901] = 141;  // a later fault than the page
  EXPECT_EQ(gpu_sentence(p), cpu_sentence(p));
  used[899] = 141;
  EXPECT_EQ(gpu_sentence(p), cpu_sentence(p));
}

// Nothing is added to the graph, and the caller is told what to change.
TEST(CommonCheck, IsRefusedWhileAGraphIsCaptured) {
  std::vector<float> in(16, 0.5f), out(16, -1.0f);
  std::vector<int32_t> used = {1, 1};
  tilewise_attention a{};
  a.struct_size = sizeof(a);
  a.device = TILEWISE_CUDA;
  a.stream = tilewise::cuda::emulator::captured_stream();
  a.batch = 2;
  a.seqlen_q = a.seqlen_k = a.heads_q = a.heads_kv = 1;
  a.head_dim = 8;
  a.q = a.k = a.v = {in.data(), 8, 8, 8};
  a.out = {out.data(), 8, 8, 8};
  a.seqused_k = used.data();
  a.scale = 1;
  a.window_left = a.window_right = -1;
  tilewise_kv_append append{};
  append.struct_size = sizeof(append);
  append.device = TILEWISE_CUDA;
  append.stream = a.stream;
  append.batch = 2;
  append.seqlen_new = append.seqlen_k = append.heads_kv = 1;
  append.head_dim = 8;
  append.k_new = append.v_new = a.k;
  append.k_cache = append.v_cache = a.out;
  const std::vector<int32_t> lengths = {0, 0};
  append.cache_seqlens = lengths.data();
  for (const bool check : {true, false}) {
    a.check = append.check = check ? 1 : 0;
    tilewise_plan_info plan{};
    plan.struct_size = sizeof(plan);
    ASSERT_EQ(tilewise_plan(&a, nullptr, TILEWISE_PASS_FORWARD, &plan), TILEWISE_OK);
    std::vector<double> workspace(static_cast<size_t>(plan.workspace_bytes) / 8 + 16, 7.0);
    void* aligned = workspace.data();
    size_t room = workspace.size() * 8;
    ASSERT_NE(std::align(64, static_cast<size_t>(plan.workspace_bytes), aligned, room), nullptr);
    const std::vector<double> before = workspace;
    const auto expect = [&](tilewise_status status) {
      EXPECT_EQ(status, check ? TILEWISE_INVALID_ARGUMENT : TILEWISE_OK) << tilewise_last_error();
      EXPECT_STREQ(tilewise_last_error(), check ? "check is 1 while the stream is being captured: "
                                                  "it waits for the GPU, so it must be 0"
                                                : "");
    };
    expect(tilewise_append_kv(&append));
    EXPECT_EQ(out, std::vector<float>(16, check ? -1.0f : 0.5f));
    out.assign(16, -1.0f);
    expect(tilewise_forward(&a, aligned, plan.workspace_bytes));
    EXPECT_EQ(out, std::vector<float>(16, check ? -1.0f : 0.5f));
    if (check) {
      EXPECT_EQ(workspace, before);
    }
  }
}

TEST(CommonCheck, ExtentOfDbias) {
  std::vector<int32_t> cu = {0, 4, 10}, used = {7, 3};
  float dbias = 0;
  tilewise::Problem p{};
  p.batch = p.kv_batch = 2;
  p.seqlen_q = 10;
  p.seqlen_k = 8;
  p.cu_seqlens_q = cu.data();
  p.seqused_k = used.data();
  p.window_left = p.window_right = -1;
  tilewise::Gradients g{};
  g.dbias = &dbias;
  g.dbias_stride_row = 10;
  g.dbias_keys = 7;
  g.dbias_rows = 6;
  EXPECT_EQ(gpu_sentence({p, g}), "");
  g.dbias_rows = 5;
  EXPECT_EQ(gpu_sentence({p, g}),
            "dbias_rows is 5: sequence 1 has 6 rows, so it must be at least that");
  g.dbias_stride_row = 0;
  EXPECT_EQ(gpu_sentence({p, g}), "");
  g.dbias_keys = 6;
  EXPECT_EQ(gpu_sentence({p, g}),
            "dbias_keys is 6: sequence 0 has 7 keys, so it must be at least that");
}

}  // namespace
