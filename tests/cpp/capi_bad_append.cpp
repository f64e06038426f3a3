// Every field of tilewise_kv_append with invalid values: the call is refused and nothing is
// written.
#include "capi_support.h"

namespace capi_test {
namespace {

// 2 sequences, 3 new keys each into a dense cache for 8, 3 rows of q, rotary over 4 of 8 columns.
struct AppendCall {
  static constexpr int64_t B = 2, Sq = 3, Snew = 3, Sk = 8, Hq = 4, Hkv = 2, D = 8, Dv = 6;
  static constexpr int64_t kPageSize = 4, kPages = 4, kWidth = 2, kRotaryRows = 8, kRotaryDim = 4;

  std::vector<float> q = pattern(B * Sq * Hq * D, 0.1f);
  std::vector<float> k_new = pattern(B * Snew * Hkv * D, 0.2f);
  std::vector<float> v_new = pattern(B * Snew * Hkv * Dv, 0.3f);
  std::vector<float> cosine = pattern(kRotaryRows * kRotaryDim / 2, 0.4f);
  std::vector<float> sine = pattern(kRotaryRows * kRotaryDim / 2, 0.5f);
  Output q_out{B * Sq * Hq * D}, k_cache{B * Sk * Hkv * D}, v_cache{B * Sk * Hkv * Dv};
  std::vector<int32_t> seqlens = {2, 5}, cu_q = {0, 1, 3}, cu_new = {0, 2, 3}, rotary = {1, 2};
  std::vector<int32_t> table = {0, 2, 1, 3}, batch_idx = {1, 0}, leftpad = {1, 2};
  std::vector<float> descales = pattern(B * Hkv, 0.6f);
  tilewise_parallel parallel{};
  tilewise_kv_append a{};

  AppendCall() {
    a.struct_size = sizeof(a);
    a.batch = B;
    a.seqlen_q = Sq;
    a.seqlen_new = Snew;
    a.seqlen_k = Sk;
    a.heads_q = Hq;
    a.heads_kv = Hkv;
    a.head_dim = D;
    a.head_dim_v = Dv;
    a.q = {q.data(), Sq * Hq * D, Hq * D, D};
    a.q_out = {q_out.data(), Sq * Hq * D, Hq * D, D};
    a.k_new = {k_new.data(), Snew * Hkv * D, Hkv * D, D};
    a.v_new = {v_new.data(), Snew * Hkv * Dv, Hkv * Dv, Dv};
    a.k_cache = {k_cache.data(), Sk * Hkv * D, Hkv * D, D};
    a.v_cache = {v_cache.data(), Sk * Hkv * Dv, Hkv * Dv, Dv};
    a.cache_seqlens = seqlens.data();
    a.rotary_cos = cosine.data();
    a.rotary_sin = sine.data();
    a.rotary_rows = kRotaryRows;
    a.rotary_dim = kRotaryDim;
  }
  AppendCall(const AppendCall&) = delete;
  AppendCall& operator=(const AppendCall&) = delete;

  void use_pages() {
    a.block_table = table.data();
    a.block_table_stride = a.block_table_width = kWidth;
    a.page_size = kPageSize;
    a.pages = kPages;
    a.k_cache.stride_batch = kPageSize * Hkv * D;
    a.v_cache.stride_batch = kPageSize * Hkv * Dv;
  }
  void use_float8() {
    a.dtype = TILEWISE_FLOAT16;
    a.kv_float8 = 1;
    a.k_descale = a.v_descale = descales.data();
    a.k_descale_stride_batch = a.v_descale_stride_batch = Hkv;
    a.k_descale_stride_head = a.v_descale_stride_head = 1;
  }
  bool untouched() const { return q_out.untouched() && k_cache.untouched() && v_cache.untouched(); }
};

using Bad = BadInput<AppendCall>;
class BadAppend : public testing::TestWithParam<Bad> {};

TEST_P(BadAppend, IsRefused) {
  AppendCall call;
  GetParam().corrupt(call);
  EXPECT_EQ(tilewise_append_kv(&call.a), TILEWISE_INVALID_ARGUMENT);
  expect_message(GetParam().message);
  EXPECT_TRUE(call.untouched());
}

constexpr int64_t kHuge = int64_t{1} << 60;

const Bad kBad[] = {
    {"struct_size", [](AppendCall& c) { c.a.struct_size = 3; }, "append.struct_size is 3"},
    {"device", [](AppendCall& c) { c.a.device = 2; },
     "device is 2: it must be 0 (CPU) or 1 (CUDA)"},
    {"device_index", [](AppendCall& c) { c.a.device_index = 4; }, "device_index is 4"},
    {"dtype", [](AppendCall& c) { c.a.dtype = 4; }, "dtype is 4"},
    {"batch", [](AppendCall& c) { c.a.batch = -2; }, "batch is -2: it must be 0 to"},
    {"seqlen_q", [](AppendCall& c) { c.a.seqlen_q = -2; }, "seqlen_q is -2: it must be 0 to"},
    {"seqlen_new", [](AppendCall& c) { c.a.seqlen_new = -2; }, "seqlen_new is -2: it must be 0 to"},
    {"seqlen_k", [](AppendCall& c) { c.a.seqlen_k = -2; }, "seqlen_k is -2: it must be 0 to"},
    {"heads_q", [](AppendCall& c) { c.a.heads_q = 0; }, "heads_q is 0: it must be 1 to"},
    {"heads_kv", [](AppendCall& c) { c.a.heads_kv = 0; }, "heads_kv is 0: it must be 1 to"},
    {"head_dim", [](AppendCall& c) { c.a.head_dim = 584; }, "head_dim is 584: it must be 1 to 576"},
    {"head_dim_v", [](AppendCall& c) { c.a.head_dim_v = -8; },
     "head_dim_v is -8: it must be 0 to 576"},
    {"rows_together", [](AppendCall& c) { c.a.seqlen_q = int64_t{1} << 41; },
     "batch * heads_q * seqlen_q is 2 * 4 * 2199023255552"},
    {"new_together", [](AppendCall& c) { c.a.seqlen_new = int64_t{1} << 41; },
     "batch * heads_kv * seqlen_new is 2 * 2 * 2199023255552"},
    {"cache_together", [](AppendCall& c) { c.a.seqlen_k = int64_t{1} << 41; },
     "kv_batch * seqlen_k * heads_kv is 2 * 2199023255552 * 2"},
    {"q_misaligned", [](AppendCall& c) { c.a.q.data = misaligned(c.a.q.data); }, "q is 0x"},
    {"q_stride", [](AppendCall& c) { c.a.q.stride_row = kHuge * 2; },
     "q.stride_row is 2305843009213693952"},
    {"q_out_null", [](AppendCall& c) { c.a.q_out.data = nullptr; }, "q_out is NULL"},
    {"q_out_left_out", [](AppendCall& c) { c.a.q_out = {}; }, "q_out is NULL"},
    {"q_out_misaligned", [](AppendCall& c) { c.a.q_out.data = misaligned(c.a.q_out.data); },
     "q_out is 0x"},
    {"q_out_overlap", [](AppendCall& c) { c.a.q_out.stride_head = 4; },
     "q_out.stride_head is 4: the entries of an output must not overlap"},
    {"q_out_in_place",
     [](AppendCall& c) {
       c.a.q_out.data = c.a.q.data;
       c.a.q.stride_row = 0;
     },
     "q_out has the data of q but other strides"},
    {"k_new_alone", [](AppendCall& c) { c.a.v_new.data = nullptr; },
     "k_new is given and v_new is NULL: give both or neither"},
    {"v_new_alone", [](AppendCall& c) { c.a.k_new.data = nullptr; },
     "k_new is NULL and v_new is given: give both or neither"},
    {"k_new_misaligned", [](AppendCall& c) { c.a.k_new.data = misaligned(c.a.k_new.data); },
     "k_new is 0x"},
    {"v_new_misaligned", [](AppendCall& c) { c.a.v_new.data = misaligned(c.a.v_new.data); },
     "v_new is 0x"},
    {"k_cache_null", [](AppendCall& c) { c.a.k_cache.data = nullptr; }, "k_cache is NULL"},
    {"v_cache_null", [](AppendCall& c) { c.a.v_cache.data = nullptr; }, "v_cache is NULL"},
    {"k_cache_misaligned", [](AppendCall& c) { c.a.k_cache.data = misaligned(c.a.k_cache.data); },
     "k_cache is 0x"},
    {"k_cache_overlap", [](AppendCall& c) { c.a.k_cache.stride_row = 8; },
     "k_cache.stride_head is 8: the entries of an output must not overlap, so it must "
     "be at least 64"},
    {"v_cache_overlap", [](AppendCall& c) { c.a.v_cache.stride_batch = 0; },
     "v_cache.stride_batch is 0"},
    {"cache_seqlens", [](AppendCall& c) { c.a.cache_seqlens = misaligned(c.seqlens.data()); },
     "cache_seqlens is 0x"},
    {"cache_seqlens_negative", [](AppendCall& c) { c.seqlens[1] = -1; },
     "cache_seqlens[1] is -1: with 3 new keys, 0 to 5 is allowed in a cache for 8 keys"},
    {"cache_seqlens_full", [](AppendCall& c) { c.seqlens[0] = 6; },
     "cache_seqlens[0] is 6: with 3 new keys, 0 to 5 is allowed in a cache for 8 keys"},
    {"cache_as_long_as_the_new_keys", [](AppendCall& c) { c.a.seqlen_k = 3; },
     "cache_seqlens[0] is 2: with 3 new keys it must be 0 in a cache for 3 keys"},
    {"cache_too_small", [](AppendCall& c) { c.a.seqlen_k = 2; },
     "cache_seqlens[0] is 2: no value is valid, because 3 new keys do not fit into a cache for 2 "
     "keys"},
    {"cu_seqlens_q",
     [](AppendCall& c) {
       c.a.cu_seqlens_q = c.cu_q.data();
       c.cu_q[2] = 4;
     },
     "cu_seqlens_q[2] is 4: it must be at most seqlen_q, which is 3"},
    {"cu_seqlens_q_misaligned", [](AppendCall& c) { c.a.cu_seqlens_q = misaligned(c.cu_q.data()); },
     "cu_seqlens_q is 0x"},
    {"cu_seqlens_new",
     [](AppendCall& c) {
       c.a.cu_seqlens_new = c.cu_new.data();
       c.cu_new[1] = -1;
     },
     "cu_seqlens_new[1] is -1: it must not be less than the entry before it, 0"},
    {"cu_seqlens_new_misaligned",
     [](AppendCall& c) { c.a.cu_seqlens_new = misaligned(c.cu_new.data()); },
     "cu_seqlens_new is 0x"},
    {"rotary_seqlens",
     [](AppendCall& c) {
       c.a.rotary_seqlens = c.rotary.data();
       c.rotary[0] = -1;
     },
     "rotary_seqlens places sequence 0 at position -1"},
    {"rotary_seqlens_misaligned",
     [](AppendCall& c) { c.a.rotary_seqlens = misaligned(c.rotary.data()); },
     "rotary_seqlens is 0x"},
    {"page_size",
     [](AppendCall& c) {
       c.use_pages();
       c.a.page_size = -1;
     },
     "page_size is -1: it must be 1 to"},
    {"pages",
     [](AppendCall& c) {
       c.use_pages();
       c.a.pages = -1;
     },
     "pages is -1: it must be 0 to"},
    {"pages_few",
     [](AppendCall& c) {
       c.use_pages();
       c.a.pages = 3;
     },
     "block_table[1, 1] is 3: it must be at least 0 and less than pages, which is 3"},
    {"block_table_entry",
     [](AppendCall& c) {
       c.use_pages();
       c.table[0] = -4;
     },
     "block_table[0, 0] is -4"},
    {"block_table_misaligned",
     [](AppendCall& c) {
       c.use_pages();
       c.a.block_table = misaligned(c.table.data());
     },
     "block_table is 0x"},
    {"block_table_width",
     [](AppendCall& c) {
       c.use_pages();
       c.a.block_table_width = 1;
     },
     "cache_seqlens[0] is 2: with 3 new keys, 0 to 1 is allowed in a cache for 4 keys"},
    {"block_table_width_negative",
     [](AppendCall& c) {
       c.use_pages();
       c.a.block_table_width = -1;
     },
     "block_table_width is -1"},
    {"block_table_stride",
     [](AppendCall& c) {
       c.use_pages();
       c.a.block_table_stride = kHuge;
     },
     "block_table_stride is 1152921504606846976"},
    {"block_table_shared",
     [](AppendCall& c) {
       c.use_pages();
       c.seqlens = {4, 2};
       c.table = {0, 2, 2, 3};
     },
     "block_table[1, 0] is 2, like block_table[0, 1], and both would hold a new key in row 2 of "
     "that page: every new key needs a row of its own"},
    {"block_table_twice",
     [](AppendCall& c) {
       c.use_pages();
       c.seqlens = {2, 0};
       c.a.seqlen_new = 5;
       c.cu_new = {0, 0, 5};
       c.a.cu_seqlens_new = c.cu_new.data();
       c.table = {0, 1, 3, 3};
     },
     "block_table[1, 1] is 3, like block_table[1, 0], and both would hold a new key in row 0"},
    {"pages_and_kv_batch_idx",
     [](AppendCall& c) {
       c.use_pages();
       c.a.kv_batch_idx = c.batch_idx.data();
     },
     "kv_batch_idx is given together with block_table"},
    {"kv_batch", [](AppendCall& c) { c.a.kv_batch = -1; }, "kv_batch is -1"},
    {"kv_batch_small", [](AppendCall& c) { c.a.kv_batch = 1; },
     "kv_batch is 1: without kv_batch_idx it must be at least batch, which is 2"},
    {"kv_batch_idx",
     [](AppendCall& c) {
       c.a.kv_batch_idx = c.batch_idx.data();
       c.batch_idx[1] = 2;
     },
     "kv_batch_idx[1] is 2: it must be at least 0 and less than kv_batch, which is 2"},
    {"kv_batch_idx_twice",
     [](AppendCall& c) {
       c.a.kv_batch_idx = c.batch_idx.data();
       c.batch_idx[1] = 1;
     },
     "kv_batch_idx[1] is 1, like kv_batch_idx[0]"},
    {"kv_batch_idx_misaligned",
     [](AppendCall& c) { c.a.kv_batch_idx = misaligned(c.batch_idx.data()); },
     "kv_batch_idx is 0x"},
    {"leftpad_k",
     [](AppendCall& c) {
       c.a.leftpad_k = c.leftpad.data();
       c.leftpad[0] = 3;
     },
     "leftpad_k[0] is 3: it must be 0 to cache_seqlens[0], which is 2"},
    {"leftpad_k_negative",
     [](AppendCall& c) {
       c.a.leftpad_k = c.leftpad.data();
       c.leftpad[0] = -1;
     },
     "leftpad_k[0] is -1"},
    {"leftpad_k_misaligned", [](AppendCall& c) { c.a.leftpad_k = misaligned(c.leftpad.data()); },
     "leftpad_k is 0x"},
    {"rotary_cos_alone", [](AppendCall& c) { c.a.rotary_sin = nullptr; },
     "rotary_sin is NULL and rotary_cos is given: give both or neither"},
    {"rotary_sin_alone", [](AppendCall& c) { c.a.rotary_cos = nullptr; },
     "rotary_cos is NULL and rotary_sin is given: give both or neither"},
    {"rotary_cos_misaligned", [](AppendCall& c) { c.a.rotary_cos = misaligned(c.cosine.data()); },
     "rotary_cos is 0x"},
    {"rotary_sin_misaligned", [](AppendCall& c) { c.a.rotary_sin = misaligned(c.sine.data()); },
     "rotary_sin is 0x"},
    {"rotary_rows", [](AppendCall& c) { c.a.rotary_rows = 7; },
     "rotary_rows is 7: sequence 1 is rotated up to position 7, so it must be larger"},
    {"rotary_rows_negative", [](AppendCall& c) { c.a.rotary_rows = -7; }, "rotary_rows is -7"},
    {"rotary_dim_odd", [](AppendCall& c) { c.a.rotary_dim = 3; },
     "rotary_dim is 3: it must be an even number up to head_dim, which is 8"},
    {"rotary_dim_large", [](AppendCall& c) { c.a.rotary_dim = 10; }, "rotary_dim is 10"},
    {"rotary_dim_negative", [](AppendCall& c) { c.a.rotary_dim = -2; }, "rotary_dim is -2"},
    {"rotary_interleaved", [](AppendCall& c) { c.a.rotary_interleaved = 2; },
     "rotary_interleaved is 2: it must be 0 to 1"},
    {"q_single_position", [](AppendCall& c) { c.a.q_single_position = -1; },
     "q_single_position is -1: it must be 0 to 1"},
    {"check", [](AppendCall& c) { c.a.check = 2; }, "check is 2: it must be 0 to 1"},
    {"kv_float8", [](AppendCall& c) { c.a.kv_float8 = 2; }, "kv_float8 is 2: it must be 0 to 1"},
    {"kv_float8_dtype", [](AppendCall& c) { c.a.kv_float8 = 1; },
     "kv_float8 is 1 with dtype float32: float16 and bfloat16 are allowed"},
    {"k_descale", [](AppendCall& c) { c.a.k_descale = c.descales.data(); },
     "k_descale is given, but k is not float8_e4m3"},
    {"v_descale", [](AppendCall& c) { c.a.v_descale = c.descales.data(); },
     "v_descale is given, but v is not float8_e4m3"},
    {"k_descale_misaligned",
     [](AppendCall& c) {
       c.use_float8();
       c.a.k_descale = misaligned(c.descales.data());
     },
     "k_descale is 0x"},
    {"v_descale_misaligned",
     [](AppendCall& c) {
       c.use_float8();
       c.a.v_descale = misaligned(c.descales.data(), 2);
     },
     "v_descale is 0x"},
    {"k_descale_stride_batch",
     [](AppendCall& c) {
       c.use_float8();
       c.a.k_descale_stride_batch = -kHuge;
     },
     "k_descale_stride_batch is -1152921504606846976: with 2 entries"},
    {"k_descale_stride_head",
     [](AppendCall& c) {
       c.use_float8();
       c.a.k_descale_stride_head = kHuge;
     },
     "k_descale_stride_head is 1152921504606846976: with 2 entries"},
    {"v_descale_stride_batch",
     [](AppendCall& c) {
       c.use_float8();
       c.a.v_descale_stride_batch = INT64_MAX;
     },
     "v_descale_stride_batch is 9223372036854775807: with 2 entries"},
    {"v_descale_stride_head",
     [](AppendCall& c) {
       c.use_float8();
       c.a.v_descale_stride_head = kHuge;
     },
     "v_descale_stride_head is 1152921504606846976: with 2 entries"},
    {"parallel",
     [](AppendCall& c) {
       c.parallel.threads = -3;
       c.a.parallel = &c.parallel;
     },
     "parallel.threads is -3"},
};
INSTANTIATE_TEST_SUITE_P(, BadAppend, testing::ValuesIn(kBad), bad_input_name<AppendCall>);

TEST(BadAppendStruct, NullIsRefused) {
  EXPECT_EQ(tilewise_append_kv(nullptr), TILEWISE_INVALID_ARGUMENT);
  expect_message("append is NULL");
}

TEST(BadAppendStruct, ProblemWithoutKernelIsUnsupported) {
  AppendCall call;
  if (!has_gpu()) {
    call.a.device = TILEWISE_CUDA;
    EXPECT_EQ(tilewise_append_kv(&call.a), TILEWISE_UNSUPPORTED);
    call.a.device = TILEWISE_CPU;
  }
  call.a.dtype = TILEWISE_FLOAT8_E4M3;
  EXPECT_EQ(tilewise_append_kv(&call.a), TILEWISE_UNSUPPORTED);
  expect_message("float8_e4m3");
  EXPECT_TRUE(call.untouched());
}

// A page that two sequences share but only one writes to, and a page in which they own different
// rows.
TEST(Append, SequencesMaySharePages) {
  AppendCall prefix;
  prefix.use_pages();
  prefix.seqlens = {4, 4};
  prefix.table = {0, 2, 0, 3};
  EXPECT_EQ(tilewise_append_kv(&prefix.a), TILEWISE_OK) << tilewise_last_error();
  AppendCall rows;
  rows.use_pages();
  rows.a.seqlen_new = 2;
  rows.seqlens = {4, 2};
  rows.table = {0, 2, 2, 3};
  EXPECT_EQ(tilewise_append_kv(&rows.a), TILEWISE_OK) << tilewise_last_error();
}

TEST(Append, WritesTheNewKeysAndNothingElse) {
  AppendCall call;
  call.a.rotary_cos = call.a.rotary_sin = nullptr;
  ASSERT_EQ(tilewise_append_kv(&call.a), TILEWISE_OK) << tilewise_last_error();
  for (std::size_t i = 0; i < call.q_out.size(); ++i) ASSERT_EQ(call.q_out[i], call.q[i]);
  const int64_t row = AppendCall::Hkv * AppendCall::D;
  Output poisoned(1);
  for (int64_t b = 0; b < AppendCall::B; ++b) {
    const int64_t begin = call.seqlens[static_cast<std::size_t>(b)];
    for (int64_t j = 0; j < AppendCall::Sk; ++j) {
      const bool appended = j >= begin && j < begin + AppendCall::Snew;
      for (int64_t c = 0; c < row; ++c) {
        const float* written = call.k_cache.data() + (b * AppendCall::Sk + j) * row + c;
        const float* expected =
            appended ? call.k_new.data() + (b * AppendCall::Snew + j - begin) * row + c
                     : poisoned.data();
        ASSERT_EQ(std::memcmp(written, expected, sizeof(float)), 0) << b << ", " << j << ", " << c;
      }
    }
  }
}

}  // namespace
}  // namespace capi_test
