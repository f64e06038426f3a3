// Every field of tilewise_attention with values that are invalid without following a pointer: plan,
// forward and backward refuse them with the same sentence, and nothing is written.
#include <limits>

#include "capi_support.h"

namespace capi_test {
namespace {

using Bad = BadInput<Call>;
class BadAttention : public testing::TestWithParam<Bad> {};

void expect_refused(tilewise_status status, const Call& call, const char* message) {
  EXPECT_EQ(status, TILEWISE_INVALID_ARGUMENT);
  expect_message(message);
  EXPECT_TRUE(call.untouched());
}

TEST_P(BadAttention, IsRefusedByPlan) {
  for (int32_t pass : {TILEWISE_PASS_FORWARD, TILEWISE_PASS_BACKWARD}) {
    Call call;
    GetParam().corrupt(call);
    tilewise_plan_info info{};
    info.struct_size = sizeof(info);
    const tilewise_plan_info before = info;
    expect_refused(call.plan(pass, &info), call, GetParam().message);
    EXPECT_EQ(std::memcmp(&info, &before, sizeof(info)), 0) << "the plan was written";
  }
}

TEST_P(BadAttention, IsRefusedByForward) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.forward(), call, GetParam().message);
}

TEST_P(BadAttention, IsRefusedByBackward) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.backward(), call, GetParam().message);
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kHuge = int64_t{1} << 60;

const Bad kBad[] = {
    {"struct_size_unset", [](Call& c) { c.a.struct_size = 0; }, "attention.struct_size is 0"},
    {"struct_size_small", [](Call& c) { c.a.struct_size = 480; }, "attention.struct_size is 480"},
    {"struct_size_huge", [](Call& c) { c.a.struct_size = 1u << 20; },
     "attention.struct_size is 1048576"},
    {"device", [](Call& c) { c.a.device = 7; }, "device is 7: it must be 0 (CPU) or 1 (CUDA)"},
    {"device_index", [](Call& c) { c.a.device_index = 1; }, "device_index is 1: it must be 0"},
    {"device_index_cuda",
     [](Call& c) {
       c.a.device = TILEWISE_CUDA;
       c.a.device_index = -1;
     },
     "device_index is -1"},
    {"dtype", [](Call& c) { c.a.dtype = 9; },
     "dtype is 9: it must be 0 (float32), 1 (float16), 2 (bfloat16)"},
    {"dtype_negative", [](Call& c) { c.a.dtype = -1; }, "dtype is -1"},
    {"batch", [](Call& c) { c.a.batch = -1; }, "batch is -1: it must be 0 to 2147483647"},
    {"heads_of_no_sequence",
     [](Call& c) {
       c.a.batch = 0;
       c.a.heads_q = int64_t{1} << 40;
     },
     "heads_q is 1099511627776: it must be 1 to 2147483647"},
    {"batch_huge", [](Call& c) { c.a.batch = kHuge; }, "batch is 1152921504606846976"},
    {"seqlen_q", [](Call& c) { c.a.seqlen_q = -5; }, "seqlen_q is -5: it must be 0 to"},
    {"seqlen_k", [](Call& c) { c.a.seqlen_k = -5; }, "seqlen_k is -5: it must be 0 to"},
    {"rows_together", [](Call& c) { c.a.batch = c.a.seqlen_q = int64_t{1} << 30; },
     "batch * heads_q * seqlen_q is 1073741824 * 4 * 1073741824"},
    {"rows_of_no_sequence",
     [](Call& c) {
       c.a.batch = 0;
       c.a.seqlen_q = int64_t{1} << 41;
     },
     "batch * heads_q * seqlen_q is 0 * 4 * 2199023255552"},
    {"keys_together", [](Call& c) { c.a.seqlen_k = int64_t{1} << 40; },
     "batch * heads_q * seqlen_k is 2 * 4 * 1099511627776"},
    {"heads_q_zero", [](Call& c) { c.a.heads_q = 0; }, "heads_q is 0: it must be 1 to"},
    {"heads_q_multiple", [](Call& c) { c.a.heads_q = 3; },
     "heads_q is 3: it must be a multiple of heads_kv, which is 2"},
    {"heads_kv_zero", [](Call& c) { c.a.heads_kv = 0; }, "heads_kv is 0: it must be 1 to"},
    {"heads_kv_negative", [](Call& c) { c.a.heads_kv = -2; }, "heads_kv is -2"},
    {"head_dim_zero", [](Call& c) { c.a.head_dim = 0; }, "head_dim is 0: it must be 1 to 576"},
    {"head_dim_large", [](Call& c) { c.a.head_dim = 577; }, "head_dim is 577: it must be 1 to 576"},
    {"head_dim_v_negative", [](Call& c) { c.a.head_dim_v = -1; },
     "head_dim_v is -1: it must be 0 to 576"},
    {"head_dim_v_large", [](Call& c) { c.a.head_dim_v = 577; },
     "head_dim_v is 577: it must be 0 to 576"},
    {"q_stride_batch", [](Call& c) { c.a.q.stride_batch = INT64_MAX; },
     "q.stride_batch is 9223372036854775807: with 2 entries"},
    {"q_stride_row", [](Call& c) { c.a.q.stride_row = INT64_MIN; },
     "q.stride_row is -9223372036854775808: with 5 entries"},
    {"k_stride_row", [](Call& c) { c.a.k.stride_row = kHuge; },
     "k.stride_row is 1152921504606846976"},
    {"v_stride_head", [](Call& c) { c.a.v.stride_head = kHuge * 4; },
     "v.stride_head is 4611686018427387904"},
    {"out_stride_span", [](Call& c) { c.a.out.stride_batch = kHuge; },
     "out.stride_batch is 1152921504606846976"},
    {"lse_stride_span", [](Call& c) { c.a.lse_stride_batch = kHuge; },
     "lse_stride_batch is 1152921504606846976"},
    {"max_seqlen_q", [](Call& c) { c.a.max_seqlen_q = -1; }, "max_seqlen_q is -1"},
    {"max_seqlen_k", [](Call& c) { c.a.max_seqlen_k = -1; }, "max_seqlen_k is -1"},
    {"scale_nan", [](Call& c) { c.a.scale = kNan; }, "scale is nan: it must be finite"},
    {"scale_infinite", [](Call& c) { c.a.scale = kInfinity; }, "scale is inf: it must be finite"},
    {"softcap_negative", [](Call& c) { c.a.softcap = -1.5f; },
     "softcap is -1.5: it must be 0 (off) or a finite number of at least 1.17549e-38"},
    {"softcap_of_no_inverse", [](Call& c) { c.a.softcap = 1e-40f; },
     "it must be 0 (off) or a finite number of at least 1.17549e-38"},
    {"softcap_nan", [](Call& c) { c.a.softcap = kNan; }, "softcap is nan"},
    {"dropout_p_one", [](Call& c) { c.a.dropout_p = 1.0f; },
     "dropout_p is 1: it must be at least 0 and less than 1"},
    {"dropout_p_negative", [](Call& c) { c.a.dropout_p = -0.5f; }, "dropout_p is -0.5"},
    {"dropout_p_nan", [](Call& c) { c.a.dropout_p = kNan; }, "dropout_p is nan"},
    {"alibi_stride_batch",
     [](Call& c) {
       c.a.alibi_slopes = c.slopes.data();
       c.a.alibi_stride_batch = kHuge * 2;
     },
     "alibi_stride_batch is 2305843009213693952"},
    {"bias_dtype",
     [](Call& c) {
       c.use_bias();
       c.a.bias_dtype = TILEWISE_BFLOAT16;
     },
     "bias_dtype is 2 (bfloat16): it must be float32 or the dtype of q, float32"},
    {"bias_dtype_unknown",
     [](Call& c) {
       c.use_bias();
       c.a.bias_dtype = 17;
     },
     "bias_dtype is 17 (unknown)"},
    {"bias_stride_batch",
     [](Call& c) {
       c.use_bias();
       c.a.bias_stride_batch = kHuge;
     },
     "bias_stride_batch is 1152921504606846976"},
    {"bias_stride_head",
     [](Call& c) {
       c.use_bias();
       c.a.bias_stride_head = kHuge;
     },
     "bias_stride_head is 1152921504606846976"},
    {"bias_stride_row",
     [](Call& c) {
       c.use_bias();
       c.a.bias_stride_row = -kHuge;
     },
     "bias_stride_row is -1152921504606846976"},
    {"row_offset", [](Call& c) { c.a.row_offset = -1; },
     "row_offset is -1: it must be 0 to 2147483647"},
    {"key_offset", [](Call& c) { c.a.key_offset = int64_t{1} << 31; },
     "key_offset is 2147483648: it must be 0 to 2147483647"},
    {"batch_offset", [](Call& c) { c.a.batch_offset = -1; }, "batch_offset is -1: it must be 0 to"},
    {"heads_q_total", [](Call& c) { c.a.heads_q_total = -1; },
     "heads_q_total is -1: it must be 0 to"},
    {"heads_q_total_small", [](Call& c) { c.a.heads_q_total = 3; },
     "head_offset is 0 with heads_q_total 3 and heads_q 4"},
    {"head_offset",
     [](Call& c) {
       c.a.head_offset = 5;
       c.a.heads_q_total = 8;
     },
     "head_offset is 5 with heads_q_total 8 and heads_q 4"},
    {"head_offset_negative", [](Call& c) { c.a.head_offset = -4; },
     "head_offset is -4: it must be 0 to"},
    {"heads_together",
     [](Call& c) {
       c.a.batch_offset = INT32_MAX;
       c.a.heads_q_total = INT32_MAX;
     },
     "(batch_offset + batch) * heads_q_total is 2147483649 * 2147483647"},
    {"page_size",
     [](Call& c) {
       c.use_pages();
       c.a.page_size = 0;
     },
     "page_size is 0: it must be 1 to"},
    {"pages",
     [](Call& c) {
       c.use_pages();
       c.a.pages = -1;
     },
     "pages is -1: it must be 0 to"},
    {"block_table_width",
     [](Call& c) {
       c.use_pages();
       c.a.block_table_width = -1;
     },
     "block_table_width is -1: it must be 0 to"},
    {"block_table_stride",
     [](Call& c) {
       c.use_pages();
       c.a.block_table_stride = kHuge;
     },
     "block_table_stride is 1152921504606846976"},
    {"pages_together",
     [](Call& c) {
       c.use_pages();
       c.a.page_size = int64_t{1} << 41;
     },
     "pages * page_size * heads_kv is 6 * 2199023255552 * 2"},
    {"capacity_together",
     [](Call& c) {
       c.use_pages();
       c.a.block_table_width = int64_t{1} << 41;
     },
     "block_table_width * page_size * heads_q is 2199023255552 * 3 * 4"},
    {"pages_and_kv_batch_idx",
     [](Call& c) {
       c.use_pages();
       c.a.kv_batch_idx = c.batch_idx.data();
     },
     "kv_batch_idx is given together with block_table"},
    {"varlen_and_kv_batch_idx",
     [](Call& c) {
       c.use_varlen_k();
       c.a.kv_batch_idx = c.batch_idx.data();
     },
     "kv_batch_idx is given together with cu_seqlens_k"},
    {"kv_batch_negative", [](Call& c) { c.a.kv_batch = -1; }, "kv_batch is -1: it must be 0 to"},
    {"kv_batch_small", [](Call& c) { c.a.kv_batch = 1; },
     "kv_batch is 1: without kv_batch_idx it must be at least batch, which is 2"},
    {"num_splits_negative", [](Call& c) { c.a.num_splits = -1; },
     "num_splits is -1: it must be 0 to 256"},
    {"num_splits_large", [](Call& c) { c.a.num_splits = 257; },
     "num_splits is 257: it must be 0 to 256"},
    {"deterministic", [](Call& c) { c.a.deterministic = 2; },
     "deterministic is 2: it must be 0 to 1"},
    {"check", [](Call& c) { c.a.check = -1; }, "check is -1: it must be 0 to 1"},
    {"tf32", [](Call& c) { c.a.tf32 = 2; }, "tf32 is 2: it must be 0 to 1"},
    {"batch_invariant", [](Call& c) { c.a.batch_invariant = 2; },
     "batch_invariant is 2: it must be 0 to 1"},
    {"batch_invariant_splits", [](Call& c) { c.a.batch_invariant = 1, c.a.num_splits = 3; },
     "num_splits is 3 with batch_invariant: it must be 0"},
    {"kv_float8", [](Call& c) { c.a.kv_float8 = -1; }, "kv_float8 is -1: it must be 0 to 1"},
    {"kv_float8_dtype", [](Call& c) { c.a.kv_float8 = 1; },
     "kv_float8 is 1 with dtype float32: float16, bfloat16 and float8_e4m3 are allowed"},
    {"out_dtype", [](Call& c) { c.a.out_dtype = 4; }, "out_dtype is 4: it must be 0 to 3"},
    {"reserved", [](Call& c) { c.a.reserved = 1; }, "reserved is 1: it must be 0"},
    {"q_descale",
     [](Call& c) {
       c.use_float8();
       c.a.q_descale = c.descales.data();
     },
     "q_descale is given, but q is not float8_e4m3"},
    {"bias_dtype_float8",
     [](Call& c) {
       c.a.dtype = TILEWISE_FLOAT8_E4M3;
       c.use_bias();
       c.a.bias_dtype = TILEWISE_FLOAT16;
     },
     "bias_dtype is 1 (float16): it must be float32 or bfloat16"},
    {"q_descale_stride_batch",
     [](Call& c) {
       c.a.dtype = TILEWISE_FLOAT8_E4M3;
       c.a.q_descale = c.descales.data();
       c.a.q_descale_stride_batch = kHuge;
     },
     "q_descale_stride_batch is 1152921504606846976: with 2 entries"},
    {"q_descale_stride_head",
     [](Call& c) {
       c.a.dtype = TILEWISE_FLOAT8_E4M3;
       c.a.q_descale = c.descales.data();
       c.a.q_descale_stride_head = kHuge;
     },
     "q_descale_stride_head is 1152921504606846976: with 2 entries"},
    {"k_descale", [](Call& c) { c.a.k_descale = c.descales.data(); },
     "k_descale is given, but k is not float8_e4m3"},
    {"v_descale", [](Call& c) { c.a.v_descale = c.descales.data(); },
     "v_descale is given, but v is not float8_e4m3"},
    {"k_descale_stride_batch",
     [](Call& c) {
       c.use_float8();
       c.a.k_descale_stride_batch = kHuge;
     },
     "k_descale_stride_batch is 1152921504606846976: with 2 entries"},
    {"k_descale_stride_head",
     [](Call& c) {
       c.use_float8();
       c.a.k_descale_stride_head = -kHuge;
     },
     "k_descale_stride_head is -1152921504606846976: with 2 entries"},
    {"v_descale_stride_batch",
     [](Call& c) {
       c.use_float8();
       c.a.v_descale_stride_batch = kHuge;
     },
     "v_descale_stride_batch is 1152921504606846976: with 2 entries"},
    {"v_descale_stride_head",
     [](Call& c) {
       c.use_float8();
       c.a.v_descale_stride_head = INT64_MIN;
     },
     "v_descale_stride_head is -9223372036854775808: with 2 entries"},
    {"parallel_threads",
     [](Call& c) {
       c.parallel.threads = -1;
       c.a.parallel = &c.parallel;
     },
     "parallel.threads is -1: it must be 0 to 65536"},
    {"parallel_reserved",
     [](Call& c) {
       c.parallel.reserved = 3;
       c.a.parallel = &c.parallel;
     },
     "parallel.reserved is 3: it must be 0"},
};
INSTANTIATE_TEST_SUITE_P(, BadAttention, testing::ValuesIn(kBad), bad_input_name<Call>);

// Overlapping outputs, which only the pass that writes them refuses.
TEST(BadOutput, OverlapIsRefusedWhereItIsWritten) {
  const struct {
    void (*corrupt)(Call&);
    const char* message;
  } cases[] = {
      {[](Call& c) { c.a.out.stride_batch = 0; },
       "out.stride_batch is 0: the entries of an output"},
      {[](Call& c) { c.a.out.stride_row = 23; },
       "out.stride_row is 23: the entries of an output "
       "must not overlap, so it must be at least 24"},
      {[](Call& c) { c.a.out.stride_head = -5; }, "out.stride_head is -5"},
      {[](Call& c) { c.a.lse_stride_head = 4; }, "lse_stride_head is 4"},
  };
  for (const auto& bad : cases) {
    Call call;
    bad.corrupt(call);
    expect_refused(call.forward(), call, bad.message);
    tilewise_plan_info info{};
    info.struct_size = sizeof(info);
    expect_refused(call.plan(TILEWISE_PASS_FORWARD, &info), call, bad.message);
  }
}

TEST(BadOutput, MissingOutputIsNotReportedAsOverlapping) {
  Call call;
  call.a.out = {};
  expect_refused(call.forward(), call, "out is NULL");
}

TEST(BadAttentionStruct, NullIsRefused) {
  Call call;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  const char* message = "attention is NULL";
  expect_refused(tilewise_plan(nullptr, nullptr, 0, &info), call, message);
  expect_refused(tilewise_forward(nullptr, call.workspace_data, 1 << 20), call, message);
  expect_refused(tilewise_backward(nullptr, &call.g, call.workspace_data, 1 << 20), call, message);
}

TEST(BadAttentionStruct, UnknownOptionIsRefused) {
  Call call;
  std::vector<unsigned char> newer(sizeof(tilewise_attention) + 16, 0);
  call.a.struct_size = static_cast<uint32_t>(newer.size());
  std::memcpy(newer.data(), &call.a, sizeof(call.a));
  constexpr std::size_t kUnknown = sizeof(tilewise_attention) + 8;
  newer[kUnknown] = 1;
  const auto* attention = reinterpret_cast<const tilewise_attention*>(newer.data());
  expect_refused(
      tilewise_forward(attention, call.workspace_data, call.workspace_bytes), call,
      ("attention uses an option that this version does not know: byte " + std::to_string(kUnknown))
          .c_str());
}

// Each of the sizes is valid, but their partial results take 2^68 bytes.
TEST(BadPlan, ImpossiblyLargeWorkspaceIsRefused) {
  Call call;
  call.use_varlen_q();
  call.use_varlen_k();
  call.a.batch = INT32_MAX;
  call.a.heads_q = call.a.heads_kv = 1 << 11;
  call.a.seqlen_q = call.a.seqlen_k = 1 << 20;
  call.a.head_dim_v = 512;
  call.a.out = {nullptr, 0, int64_t{512} << 11, 512};
  call.a.lse_stride_head = call.a.seqlen_q;
  call.a.num_splits = 256;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  expect_refused(call.plan(TILEWISE_PASS_FORWARD, &info), call,
                 "batch 2147483647, seqlen_q 1048576, keys 1048576, heads_q 2048, heads_kv 2048 "
                 "and num_splits 256 together take a workspace of more than the allowed "
                 "4611686018427387904 bytes");
  EXPECT_EQ(info.workspace_bytes, 0);
  call.a.num_splits = 1;
  EXPECT_EQ(call.plan(TILEWISE_PASS_FORWARD, &info), TILEWISE_OK) << tilewise_last_error();
  EXPECT_GT(info.workspace_bytes, 0);
}

TEST(BadPlan, ArgumentsAreRefused) {
  Call call;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  expect_refused(tilewise_plan(&call.a, nullptr, 2, &info), call,
                 "pass is 2: it must be 0 (forward) or 1 (backward)");
  expect_refused(tilewise_plan(&call.a, nullptr, 0, nullptr), call, "plan is NULL");
  expect_refused(tilewise_plan(&call.a, &call.g, TILEWISE_PASS_FORWARD, &info), call,
                 "gradients is given for the forward pass: it must be NULL");
  info.struct_size = 8;
  expect_refused(tilewise_plan(&call.a, nullptr, 0, &info), call, "plan.struct_size is 8");
}

// Valid problems for which this build has no kernel.
TEST(Unsupported, IsReportedInOneSentence) {
  Call call;
  if (!has_gpu()) {
    call.a.device = TILEWISE_CUDA;
    EXPECT_EQ(call.forward(), TILEWISE_UNSUPPORTED);
    expect_message("device is CUDA: ");
    expect_message("; tensors in the memory of the CPU are allowed");
    EXPECT_EQ(call.backward(), TILEWISE_UNSUPPORTED);
  }
  call.a.device = TILEWISE_CPU;
  call.a.dtype = TILEWISE_FLOAT8_E4M3;
  EXPECT_EQ(call.backward(), TILEWISE_UNSUPPORTED);
  expect_message("backward with dtype float8_e4m3: only the forward supports");
  call.a.dtype = TILEWISE_BFLOAT16;
  call.a.out_dtype = TILEWISE_OUT_FLOAT16;
  EXPECT_EQ(call.forward(), TILEWISE_UNSUPPORTED);
  expect_message(
      "out_dtype is float16 with dtype bfloat16: the dtype of q and float32 are allowed");
  EXPECT_EQ(call.backward(), TILEWISE_UNSUPPORTED);
  call.a.out_dtype = TILEWISE_OUT_DEFAULT;
  call.use_float8();
  EXPECT_EQ(call.backward(), TILEWISE_UNSUPPORTED);
  expect_message("backward with float8_e4m3 k and v (kv_float8): only the forward supports them");
  EXPECT_TRUE(call.untouched());
}

}  // namespace
}  // namespace capi_test
