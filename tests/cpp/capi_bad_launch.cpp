// Checks of a launch on the CPU that a plan does not make: pointers, and entries of index arrays.
#include "capi_support.h"

namespace capi_test {
namespace {

using Bad = BadInput<Call>;
class BadLaunch : public testing::TestWithParam<Bad> {};

void expect_refused(tilewise_status status, const Call& call, const char* message) {
  EXPECT_EQ(status, TILEWISE_INVALID_ARGUMENT);
  expect_message(message);
  EXPECT_TRUE(call.untouched());
}

TEST_P(BadLaunch, IsRefusedByForward) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.forward(), call, GetParam().message);
}

TEST_P(BadLaunch, IsRefusedByBackward) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.backward(), call, GetParam().message);
}

// A plan follows no pointer, so it does not find these faults.
TEST_P(BadLaunch, IsNotSeenByPlan) {
  for (int32_t pass : {TILEWISE_PASS_FORWARD, TILEWISE_PASS_BACKWARD}) {
    Call call;
    GetParam().corrupt(call);
    tilewise_plan_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(call.plan(pass, &info), TILEWISE_OK) << tilewise_last_error();
  }
}

const Bad kBad[] = {
    {"q_null", [](Call& c) { c.a.q.data = nullptr; }, "q is NULL: a pointer to its data is needed"},
    {"k_null", [](Call& c) { c.a.k.data = nullptr; }, "k is NULL"},
    {"v_null", [](Call& c) { c.a.v.data = nullptr; }, "v is NULL"},
    {"out_null", [](Call& c) { c.a.out.data = nullptr; }, "out is NULL"},
    {"q_misaligned", [](Call& c) { c.a.q.data = misaligned(c.a.q.data); }, "q is 0x"},
    {"k_misaligned", [](Call& c) { c.a.k.data = misaligned(c.a.k.data); }, "k is 0x"},
    {"v_misaligned", [](Call& c) { c.a.v.data = misaligned(c.a.v.data, 2); },
     "a multiple of 4 bytes is needed"},
    {"out_misaligned", [](Call& c) { c.a.out.data = misaligned(c.a.out.data); }, "out is 0x"},
    {"lse_misaligned", [](Call& c) { c.a.lse = misaligned(c.a.lse); }, "lse is 0x"},
    {"lse_low_misaligned", [](Call& c) { c.a.lse_low = misaligned(c.lse_low.data()); },
     "lse_low is 0x"},
    {"max_logits", [](Call& c) { c.a.max_logits = misaligned(c.a.lse); }, "max_logits is 0x"},
    {"scale_ptr", [](Call& c) { c.a.scale_ptr = misaligned(&c.scale); }, "scale_ptr is 0x"},
    {"alibi_slopes", [](Call& c) { c.a.alibi_slopes = misaligned(c.slopes.data()); },
     "alibi_slopes is 0x"},
    {"bias",
     [](Call& c) {
       c.use_bias();
       c.a.bias = misaligned(c.a.bias);
     },
     "bias is 0x"},
    {"dropout_state", [](Call& c) { c.a.dropout_state = misaligned(c.dropout_state, 4); },
     "dropout_state is 0x"},
    {"sinks", [](Call& c) { c.a.sinks = misaligned(c.sinks.data()); }, "sinks is 0x"},
    {"cu_seqlens_q", [](Call& c) { c.a.cu_seqlens_q = misaligned(c.cu_q.data()); },
     "cu_seqlens_q is 0x"},
    {"cu_seqlens_q_first",
     [](Call& c) {
       c.use_varlen_q();
       c.cu_q[0] = 1;
     },
     "cu_seqlens_q[0] is 1: it must be 0"},
    {"cu_seqlens_q_falls",
     [](Call& c) {
       c.use_varlen_q();
       c.cu_q[1] = 6;
     },
     "cu_seqlens_q[2] is 5: it must not be less than the entry before it, 6"},
    {"cu_seqlens_q_last",
     [](Call& c) {
       c.use_varlen_q();
       c.cu_q[2] = 6;
     },
     "cu_seqlens_q[2] is 6: it must be at most seqlen_q, which is 5"},
    {"cu_seqlens_k", [](Call& c) { c.a.cu_seqlens_k = misaligned(c.cu_k.data()); },
     "cu_seqlens_k is 0x"},
    {"cu_seqlens_k_first",
     [](Call& c) {
       c.use_varlen_k();
       c.cu_k[0] = -1;
     },
     "cu_seqlens_k[0] is -1: it must be 0"},
    {"cu_seqlens_k_falls",
     [](Call& c) {
       c.use_varlen_k();
       c.cu_k[1] = -2;
     },
     "cu_seqlens_k[1] is -2: it must not be less than the entry before it, 0"},
    {"cu_seqlens_k_last",
     [](Call& c) {
       c.use_varlen_k();
       c.cu_k[2] = 8;
     },
     "cu_seqlens_k[2] is 8: it must be at most seqlen_k, which is 7"},
    {"cu_seqlens_k_paged",
     [](Call& c) {
       c.use_pages();
       c.use_varlen_k();
       c.cu_k[1] = 0;
       c.cu_k[2] = 10;
     },
     "cu_seqlens_k says that sequence 1 has 10 keys: it can have at most block_table_width * "
     "page_size, which is 9"},
    {"cu_seqlens_k_paged_after_padding",
     [](Call& c) {
       c.use_pages();
       c.use_varlen_k();
       c.cu_k[1] = 0;
       c.cu_k[2] = 10;
       c.a.leftpad_k = c.leftpad.data();
       c.leftpad[1] = 4;
     },
     "cu_seqlens_k says that sequence 1 has 10 keys: it can have at most block_table_width * "
     "page_size, which is 9"},
    {"seqused_q", [](Call& c) { c.a.seqused_q = misaligned(c.used_q.data()); }, "seqused_q is 0x"},
    {"seqused_q_negative",
     [](Call& c) {
       c.a.seqused_q = c.used_q.data();
       c.used_q[1] = -1;
     },
     "seqused_q[1] is -1: it must be 0 to 5"},
    {"seqused_q_large",
     [](Call& c) {
       c.a.seqused_q = c.used_q.data();
       c.used_q[0] = 6;
     },
     "seqused_q[0] is 6: it must be 0 to 5"},
    {"seqused_q_varlen",
     [](Call& c) {
       c.use_varlen_q();
       c.a.seqused_q = c.used_q.data();
       c.used_q[0] = 3;
     },
     "seqused_q[0] is 3: it must be 0 to 2"},
    {"seqused_k", [](Call& c) { c.a.seqused_k = misaligned(c.used_k.data()); }, "seqused_k is 0x"},
    {"seqused_k_negative",
     [](Call& c) {
       c.a.seqused_k = c.used_k.data();
       c.used_k[0] = -7;
     },
     "seqused_k[0] is -7: it must be 0 to 7"},
    {"seqused_k_large",
     [](Call& c) {
       c.a.seqused_k = c.used_k.data();
       c.used_k[1] = 8;
     },
     "seqused_k[1] is 8: it must be 0 to 7"},
    {"seqused_k_varlen",
     [](Call& c) {
       c.use_varlen_k();
       c.a.seqused_k = c.used_k.data();
       c.used_k[0] = 4;
     },
     "seqused_k[0] is 4: it must be 0 to 3"},
    {"seqused_k_paged",
     [](Call& c) {
       c.use_pages();
       c.a.seqused_k = c.used_k.data();
       c.used_k[0] = 10;
     },
     "seqused_k[0] is 10: it must be 0 to 9"},
    {"diagonal", [](Call& c) { c.a.diagonal = misaligned(c.leftpad.data()); }, "diagonal is 0x"},
    {"leftpad_k", [](Call& c) { c.a.leftpad_k = misaligned(c.leftpad.data()); }, "leftpad_k is 0x"},
    {"leftpad_k_negative",
     [](Call& c) {
       c.a.leftpad_k = c.leftpad.data();
       c.leftpad[1] = -1;
     },
     "leftpad_k[1] is -1: it must be 0 to 7"},
    {"leftpad_k_large",
     [](Call& c) {
       c.a.leftpad_k = c.leftpad.data();
       c.leftpad[0] = 8;
     },
     "leftpad_k[0] is 8: it must be 0 to 7"},
    {"max_seqlen_q", [](Call& c) { c.a.max_seqlen_q = 4; },
     "max_seqlen_q is 4: sequence 0 has 5 rows"},
    {"max_seqlen_k", [](Call& c) { c.a.max_seqlen_k = 6; },
     "max_seqlen_k is 6: sequence 0 has 7 keys"},
    {"block_table",
     [](Call& c) {
       c.use_pages();
       c.a.block_table = misaligned(c.table.data());
     },
     "block_table is 0x"},
    {"block_table_negative",
     [](Call& c) {
       c.use_pages();
       c.table[1] = -1;
     },
     "block_table[0, 1] is -1: it must be at least 0 and less than pages, which is 6"},
    {"block_table_large",
     [](Call& c) {
       c.use_pages();
       c.table[5] = 6;
     },
     "block_table[1, 2] is 6: it must be at least 0 and less than pages, which is 6"},
    {"kv_batch_idx", [](Call& c) { c.a.kv_batch_idx = misaligned(c.batch_idx.data()); },
     "kv_batch_idx is 0x"},
    {"kv_batch_idx_negative",
     [](Call& c) {
       c.a.kv_batch_idx = c.batch_idx.data();
       c.batch_idx[1] = -1;
     },
     "kv_batch_idx[1] is -1: it must be at least 0 and less than kv_batch, which is 2"},
    {"kv_batch_idx_large",
     [](Call& c) {
       c.a.kv_batch_idx = c.batch_idx.data();
       c.batch_idx[0] = 2;
     },
     "kv_batch_idx[0] is 2"},
};
INSTANTIATE_TEST_SUITE_P(, BadLaunch, testing::ValuesIn(kBad), bad_input_name<Call>);

// The scale factors of a float8_e4m3 cache, which has no backward.
TEST(BadDescale, IsRefusedByForward) {
  Call k;
  k.use_float8();
  k.a.k_descale = misaligned(k.descales.data());
  expect_refused(k.forward(), k, "k_descale is 0x");
  Call v;
  v.use_float8();
  v.a.v_descale = misaligned(v.descales.data(), 2);
  expect_refused(v.forward(), v, "v_descale is 0x");
}

TEST(BadWorkspace, IsRefused) {
  Call call;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(call.plan(TILEWISE_PASS_BACKWARD, &info), TILEWISE_OK);
  ASSERT_GT(info.workspace_bytes, 0);
  const int64_t needed = info.workspace_bytes;
  ASSERT_LE(needed, call.workspace_bytes);

  expect_refused(tilewise_backward(&call.a, &call.g, call.workspace_data, -1), call,
                 "workspace_bytes is -1: it must be 0 or more");
  expect_refused(tilewise_backward(&call.a, &call.g, nullptr, needed), call, "workspace is NULL");
  expect_refused(tilewise_backward(&call.a, &call.g, call.workspace.data() + 32, needed), call,
                 "an address that is a multiple of 64 bytes is needed");
  EXPECT_EQ(tilewise_backward(&call.a, &call.g, call.workspace_data, needed - 1),
            TILEWISE_WORKSPACE_TOO_SMALL);
  expect_message("workspace_bytes is " + std::to_string(needed - 1) + ": at least " +
                 std::to_string(needed) + " are needed");
  EXPECT_TRUE(call.untouched());
}

// Entries of pages that hold no key in use may have any value.
TEST(GoodLaunch, UnusedEntriesOfTheBlockTableAreNotRead) {
  Call call;
  call.use_pages();
  call.a.seqused_k = call.used_k.data();
  call.used_k = {3, 6};
  call.table = {0, -1, 99, 1, 3, INT32_MIN};
  EXPECT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
}

// lse_low is the rounding error of lse, so it needs lse; a plan does not look at the pointers.
TEST(BadLowHalf, NeedsLse) {
  Call call;
  call.a.lse = nullptr;
  call.a.lse_low = call.lse_low.data();
  expect_refused(call.forward(), call, "lse_low is given, but lse is NULL");
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(call.plan(TILEWISE_PASS_FORWARD, &info), TILEWISE_OK) << tilewise_last_error();
}

// lse + lse_low is the log-sum-exp to twice the precision of lse. Every row of lse_low is written;
// unused rows and rows that see no key have 0.
TEST(GoodLaunch, LowHalfIsTheRoundingError) {
  Call call;
  call.use_bias();
  call.a.lse_low = call.lse_low.data();
  for (float& x : call.bias) x = -1e10f;
  call.used_q = {3, 2};
  call.used_k = {7, 0};
  call.a.seqused_q = call.used_q.data();
  call.a.seqused_k = call.used_k.data();
  ASSERT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
  for (std::size_t i = 0; i < call.lse.size(); ++i) {
    const bool sees = i < static_cast<std::size_t>(Call::Hq * Call::Sq) && i % Call::Sq < 3;
    EXPECT_EQ(call.lse[i], sees ? -1e10f : -INFINITY) << i;
    EXPECT_NEAR(call.lse_low[i], sees ? std::log(7.0f) : 0.0f, 1e-6f) << i;
  }
}

// Tensors without elements may have null pointers.
TEST(GoodLaunch, EmptyTensorsMayBeNull) {
  Call call;
  call.a.seqlen_k = 0;
  call.a.k.data = call.a.v.data = nullptr;
  EXPECT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
  for (std::size_t i = 0; i < call.out.size(); ++i) EXPECT_EQ(call.out[i], 0.0f);
  for (std::size_t i = 0; i < call.lse.size(); ++i) EXPECT_EQ(call.lse[i], -INFINITY);
  Call nothing;
  nothing.a.batch = 0;
  nothing.a.q.data = nothing.a.k.data = nothing.a.v.data = nothing.a.out.data = nullptr;
  nothing.a.lse = nullptr;
  nothing.a.lse_low = nothing.lse_low.data();
  EXPECT_EQ(nothing.forward(), TILEWISE_OK) << tilewise_last_error();
}

}  // namespace
}  // namespace capi_test
