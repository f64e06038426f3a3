// tilewise_append_kv as a kernel, compared with the CPU. The caches and q_out are compared in full:
// elements outside of the append must not change.
#include <gtest/gtest.h>

#include "call.h"
#include "cuda/common/kernels.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::filled;
using cuda_test::Random;
using tilewise::BFloat16;
using tilewise::Half;
using tilewise::to_float;

template <class T>
struct AppendCall {
  Random random;
  tilewise_kv_append a{};
  bool aligned;  // rows at multiples of 16 bytes
  std::vector<T> q, q_out, k_new, v_new, k_cache, v_cache, cosine, sine;
  std::vector<int32_t> lengths, cu_q{0}, cu_new{0}, table, index, leftpad, positions;

  explicit AppendCall(uint32_t seed) : random{std::mt19937(seed)} {
    aligned = random.coin();
    draw_sizes();
    draw_sequences();
    draw_tensors();
    draw_rotary();
  }

  void draw_sizes() {
    a.struct_size = sizeof(a);
    a.dtype = cuda_test::Type<T>::kDtype;
    a.batch = random.between(0, 4);
    a.kv_batch = a.batch;
    a.heads_kv = random.between(1, 6);
    a.heads_q = a.heads_kv * random.between(1, 3);
    a.head_dim = aligned ? 16 * random.between(1, 12) : random.between(2, 70);
    a.head_dim_v = aligned ? 16 * random.between(1, 12) : random.between(1, 70);
    a.seqlen_q = random.between(0, 5);
    a.seqlen_new = random.between(0, 5);
    a.seqlen_k = random.between(5, 30);
  }

  // Distinct rows or pages for every sequence; lengths leave room for the new keys.
  void draw_sequences() {
    const bool paged = random.coin(), indexed = !paged && random.coin();
    const bool varlen_q = random.coin(), varlen_new = random.coin();
    if (paged) {
      a.page_size = random.between(1, 9);
      a.block_table_width = tilewise::ceil_div(a.seqlen_k, a.page_size);
      a.block_table_stride = a.block_table_width + random.between(0, 1);
      a.pages = a.batch * a.block_table_width + random.between(0, 2);
    }
    if (indexed) a.kv_batch = a.batch + 2;
    std::vector<int32_t> places(static_cast<size_t>(paged ? a.pages : a.kv_batch));
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    std::shuffle(places.begin(), places.end(), random.engine);
    table.assign(static_cast<size_t>(a.batch * a.block_table_stride) + 1, -1);
    index.assign(1, 0);
    size_t next = 0;
    for (int64_t b = 0; b < a.batch; ++b) {
      const int64_t rows_q = varlen_q ? random.between(0, 4) : a.seqlen_q;
      const int64_t rows_new = varlen_new ? random.between(0, 4) : a.seqlen_new;
      cu_q.push_back(cu_q.back() + static_cast<int32_t>(rows_q));
      cu_new.push_back(cu_new.back() + static_cast<int32_t>(rows_new));
      lengths.push_back(static_cast<int32_t>(random.between(0, a.seqlen_k - rows_new)));
      leftpad.push_back(static_cast<int32_t>(random.between(0, lengths.back())));
      positions.push_back(static_cast<int32_t>(random.between(0, 9)));
      for (int64_t i = 0; paged && i < a.block_table_width; ++i)
        table[static_cast<size_t>(b * a.block_table_stride + i)] = places[next++];
      if (indexed) index.insert(index.end() - 1, places[static_cast<size_t>(b)]);
    }
    if (varlen_q) {
      a.seqlen_q = cu_q.back() + random.between(0, 2);
      a.cu_seqlens_q = cu_q.data();
    }
    if (varlen_new) {
      a.seqlen_new = cu_new.back() + random.between(0, 2);
      a.cu_seqlens_new = cu_new.data();
    }
    if (random.coin()) {
      lengths.push_back(0);
      leftpad.push_back(0);
      a.cache_seqlens = lengths.data();
      a.leftpad_k = random.coin() ? leftpad.data() : nullptr;
    }
    if (paged) a.block_table = table.data();
    if (indexed) a.kv_batch_idx = index.data();
    positions.push_back(0);
    if (random.coin()) a.rotary_seqlens = positions.data();
  }

  tilewise_tensor view(std::vector<T>& data, int64_t batches, int64_t rows, int64_t heads,
                       int64_t columns) {
    const int64_t head = columns + (random.rarely() ? (aligned ? 16 : 3) : 0);
    const int64_t row = heads * head;
    data = filled<T>(std::max<int64_t>(1, batches * rows * row), 0.0f);
    for (T& x : data) x = tilewise::from_float<T>(random.normal());
    return {data.data(), rows * row, row, head};
  }

  void draw_tensors() {
    const int64_t q_batches = a.cu_seqlens_q != nullptr ? 1 : a.batch;
    const int64_t new_batches = a.cu_seqlens_new != nullptr ? 1 : a.batch;
    const bool paged = a.block_table != nullptr;
    const int64_t blocks = paged ? a.pages : a.kv_batch;
    const int64_t block_rows = paged ? a.page_size : a.seqlen_k;
    if (!random.rarely()) {
      a.q = view(q, q_batches, a.seqlen_q, a.heads_q, a.head_dim);
      a.q_out = a.q;  // in place, or into a separate tensor
      if (random.coin()) a.q_out = view(q_out, q_batches, a.seqlen_q, a.heads_q, a.head_dim);
    }
    if (!random.rarely()) {
      a.k_new = view(k_new, new_batches, a.seqlen_new, a.heads_kv, a.head_dim);
      a.v_new = view(v_new, new_batches, a.seqlen_new, a.heads_kv, a.head_dim_v);
    }
    a.k_cache = view(k_cache, blocks, block_rows, a.heads_kv, a.head_dim);
    a.v_cache = view(v_cache, blocks, block_rows, a.heads_kv, a.head_dim_v);
  }

  void draw_rotary() {
    a.rotary_interleaved = random.coin() ? 1 : 0;
    a.q_single_position = random.coin() ? 1 : 0;
    if (random.rarely()) return;
    a.rotary_dim =
        aligned && random.coin() ? a.head_dim / 16 * 16 : 2 * random.between(0, a.head_dim / 2);
    a.rotary_rows = 100;
    const auto angles = [&](std::vector<T>& to) {
      to = filled<T>(a.rotary_rows * a.rotary_dim / 2 + 1, 0.0f);
      for (T& x : to) x = tilewise::from_float<T>(std::cos(random.normal()));
      return to.data();
    };
    a.rotary_cos = angles(cosine);
    a.rotary_sin = angles(sine);
  }
};

template <class T>
class CommonAppend : public testing::Test {};
using Types = testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(CommonAppend, Types);

// The CPU may contract a product and a sum to an FMA, which rounds once instead of twice.
template <class T>
void expect_near(const std::vector<T>& a, const std::vector<T>& b, const char* what,
                 uint32_t seed) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = to_float(a[i]), y = to_float(b[i]);
    ASSERT_LE(std::abs(x - y), 1.01 * cuda_test::Type<T>::kEpsilon * std::max(1.0, std::abs(y)))
        << what << "[" << i << "], seed " << seed;
  }
}

TYPED_TEST(CommonAppend, AgreesWithTheCpu) {
  int64_t launches = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    AppendCall<TypeParam> cpu(seed), gpu(seed);
    ASSERT_EQ(tilewise_append_kv(&cpu.a), TILEWISE_OK) << tilewise_last_error();
    const common::AppendParams params{gpu.a};
    const int64_t blocks = common::append_blocks(gpu.a);
    launches += blocks != 0 ? 1 : 0;
    tilewise::cuda::launch(common::tensor_kernels(gpu.a.dtype).append, blocks, nullptr, params);
    expect_near(gpu.q, cpu.q, "q", seed);
    expect_near(gpu.q_out, cpu.q_out, "q_out", seed);
    expect_near(gpu.k_cache, cpu.k_cache, "k_cache", seed);
    expect_near(gpu.v_cache, cpu.v_cache, "v_cache", seed);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(launches, 200);
}

// The index entries are checked on the GPU before anything is written.
TYPED_TEST(CommonAppend, CheckRefusesWrongEntries) {
  int64_t refused = 0;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    AppendCall<TypeParam> call(seed);
    call.a.device = TILEWISE_CUDA;
    call.a.check = 1;
    ASSERT_EQ(tilewise_append_kv(&call.a), TILEWISE_OK) << tilewise_last_error();
    if (call.a.batch == 0 || call.a.cache_seqlens == nullptr) continue;
    const auto last = static_cast<size_t>(call.a.batch - 1);
    call.lengths[last] = -7;
    const std::vector<TypeParam> before = call.k_cache;
    EXPECT_EQ(tilewise_append_kv(&call.a), TILEWISE_INVALID_ARGUMENT) << seed;
    const std::string expected = "cache_seqlens[" + std::to_string(last) + "] is -7";
    EXPECT_NE(std::string(tilewise_last_error()).find(expected), std::string::npos)
        << tilewise_last_error();
    for (size_t i = 0; i < before.size(); ++i)
      ASSERT_EQ(to_float(before[i]), to_float(call.k_cache[i])) << seed;
    ++refused;
  }
  EXPECT_GT(refused, 20);
}

}  // namespace
