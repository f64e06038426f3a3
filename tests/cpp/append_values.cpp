// What tilewise_append_kv writes, on random problems: every element of the caches and of q_out is
// predicted from the definition. Buffers have exactly the required size, so that sanitizers detect
// accesses outside of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/half.h"
#include "cpu/append.h"

namespace {

using tilewise::BFloat16;
using tilewise::from_float;
using tilewise::Half;
using tilewise::Parallel;
using tilewise::to_float;

template <class T>
struct Storage;
template <>
struct Storage<float> {
  static constexpr int32_t dtype = TILEWISE_FLOAT32;
  static constexpr double unit = 0x1p-23;
};
template <>
struct Storage<Half> {
  static constexpr int32_t dtype = TILEWISE_FLOAT16;
  static constexpr double unit = 0x1p-10;
};
template <>
struct Storage<BFloat16> {
  static constexpr int32_t dtype = TILEWISE_BFLOAT16;
  static constexpr double unit = 0x1p-7;
};

// A hook that runs tasks from the last to the first: the order must not matter.
void backwards(void*, int64_t tasks, tilewise_task task, void* context) {
  for (int64_t i = tasks - 1; i >= 0; --i) task(context, i);
}

struct Random {
  std::mt19937 engine;
  int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  }
  bool coin() { return between(0, 1) == 1; }
};

template <class T>
std::vector<T> noise(Random& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = from_float<T>(normal(random.engine));
  return values;
}

template <class T>
struct Case {
  tilewise_kv_append a{};
  bool packed_q, packed_new, paged, rotates;
  std::vector<int32_t> lengths, cu_q{0}, cu_new{0}, table, index, leftpad, positions;
  std::vector<T> q, q_out, k_new, v_new, k_cache, v_cache, cosine, sine;

  explicit Case(uint32_t seed) {
    Random random{std::mt19937(seed)};
    sizes(random);
    sequences(random);
    tensors(random);
  }

  void sizes(Random& random) {
    a.struct_size = sizeof(a);
    a.dtype = Storage<T>::dtype;
    a.batch = random.between(0, 4);
    a.heads_kv = random.between(1, 3);
    a.heads_q = a.heads_kv * random.between(1, 3);
    a.head_dim = random.between(2, 40);
    a.head_dim_v = random.between(1, 40);
    a.seqlen_q = random.between(0, 5);
    a.seqlen_new = random.between(0, 5);
    a.seqlen_k = random.between(5, 12);
    paged = random.coin();
    if (paged) {
      a.page_size = random.between(1, 5);
      a.block_table_width = (a.seqlen_k + a.page_size - 1) / a.page_size;
      a.block_table_stride = a.block_table_width + random.between(0, 1);
      a.pages = a.batch * a.block_table_width + random.between(0, 2);
    }
    packed_q = random.coin();
    packed_new = random.coin();
    rotates = random.coin();
    a.rotary_interleaved = random.coin();
    a.q_single_position = random.coin();
  }

  // Distinct rows or pages for every sequence, and lengths that leave room for the new keys.
  void sequences(Random& random) {
    const bool indexed = !paged && random.coin(), padded = random.coin(), other = random.coin();
    a.kv_batch = indexed ? a.batch + 2 : a.batch;
    std::vector<int32_t> places(static_cast<size_t>(paged ? a.pages : a.kv_batch));
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    std::shuffle(places.begin(), places.end(), random.engine);
    table.assign(static_cast<size_t>(paged ? a.batch * a.block_table_stride : 0), -1);
    size_t next = 0;
    for (int64_t b = 0; b < a.batch; ++b) {
      const int64_t rows_q = packed_q ? random.between(0, 4) : a.seqlen_q;
      const int64_t rows_new = packed_new ? random.between(0, 4) : a.seqlen_new;
      cu_q.push_back(cu_q.back() + static_cast<int32_t>(rows_q));
      cu_new.push_back(cu_new.back() + static_cast<int32_t>(rows_new));
      lengths.push_back(static_cast<int32_t>(random.between(0, a.seqlen_k - rows_new)));
      leftpad.push_back(static_cast<int32_t>(random.between(0, lengths.back())));
      positions.push_back(static_cast<int32_t>(random.between(0, 9)));
      for (int64_t i = 0; paged && i < a.block_table_width; ++i) {
        table[static_cast<size_t>(b * a.block_table_stride + i)] = places[next++];
      }
      if (indexed) index.push_back(places[static_cast<size_t>(b)]);
    }
    if (packed_q) a.seqlen_q = cu_q.back() + random.between(0, 2);
    if (packed_new) a.seqlen_new = cu_new.back() + random.between(0, 2);
    a.cache_seqlens = lengths.data();
    a.cu_seqlens_q = packed_q ? cu_q.data() : nullptr;
    a.cu_seqlens_new = packed_new ? cu_new.data() : nullptr;
    a.block_table = paged ? table.data() : nullptr;
    a.kv_batch_idx = indexed ? index.data() : nullptr;
    a.leftpad_k = padded ? leftpad.data() : nullptr;
    a.rotary_seqlens = other ? positions.data() : nullptr;
  }

  void tensors(Random& random) {
    const int64_t rows_q = packed_q ? a.seqlen_q : a.batch * a.seqlen_q;
    const int64_t rows_new = packed_new ? a.seqlen_new : a.batch * a.seqlen_new;
    const int64_t rows_cache = paged ? a.pages * a.page_size : a.kv_batch * a.seqlen_k;
    const int64_t per_block = paged ? a.page_size : a.seqlen_k;
    const auto make = [&](std::vector<T>& data, int64_t rows, int64_t block, int64_t heads,
                          int64_t columns) -> tilewise_tensor {
      data = noise<T>(random, rows * heads * columns);
      return {data.data(), block * heads * columns, heads * columns, columns};
    };
    a.q = make(q, rows_q, a.seqlen_q, a.heads_q, a.head_dim);
    a.q_out = make(q_out, rows_q, a.seqlen_q, a.heads_q, a.head_dim);
    a.k_new = make(k_new, rows_new, a.seqlen_new, a.heads_kv, a.head_dim);
    a.v_new = make(v_new, rows_new, a.seqlen_new, a.heads_kv, a.head_dim_v);
    a.k_cache = make(k_cache, rows_cache, per_block, a.heads_kv, a.head_dim);
    a.v_cache = make(v_cache, rows_cache, per_block, a.heads_kv, a.head_dim_v);
    if (!rotates) return;
    a.rotary_dim = 2 * random.between(1, a.head_dim / 2);
    a.rotary_rows = a.seqlen_k + 16;
    cosine = noise<T>(random, a.rotary_rows * a.rotary_dim / 2);
    sine = noise<T>(random, a.rotary_rows * a.rotary_dim / 2);
    a.rotary_cos = cosine.data();
    a.rotary_sin = sine.data();
  }

  int64_t position(int64_t b) const {
    const auto at = static_cast<size_t>(b);
    if (a.rotary_seqlens) return positions[at];
    return lengths[at] - (a.leftpad_k ? leftpad[at] : 0);
  }

  // Element `column` of a head rotated at `position`.
  double rotated(const T* head, int64_t column, int64_t position) const {
    const double element = to_float(head[column]);
    if (!rotates || column >= a.rotary_dim) return element;
    const int64_t half = a.rotary_dim / 2;
    const bool second = a.rotary_interleaved ? column % 2 == 1 : column >= half;
    const int64_t pair = a.rotary_interleaved ? column / 2 : column % half;
    const int64_t step = a.rotary_interleaved ? 1 : half;
    const double partner = to_float(head[second ? column - step : column + step]);
    const auto at = static_cast<size_t>(position * half + pair);
    const double c = to_float(cosine[at]), s = to_float(sine[at]);
    return second ? partner * s + element * c : element * c - partner * s;
  }

  int64_t cache_row(int64_t b, int64_t position) const {
    if (!paged) return (a.kv_batch_idx ? index[static_cast<size_t>(b)] : b) * a.seqlen_k + position;
    const int64_t entry = b * a.block_table_stride + position / a.page_size;
    return table[static_cast<size_t>(entry)] * a.page_size + position % a.page_size;
  }
};

// Untouched elements keep their bits; rotated ones may differ by rounding.
template <class T>
struct Expected {
  std::vector<double> values;
  explicit Expected(const std::vector<T>& before) {
    for (const T& x : before) values.push_back(to_float(x));
  }
  double& at(int64_t i) { return values[static_cast<size_t>(i)]; }
  void compare(const std::vector<T>& got, const char* name, uint32_t seed) const {
    for (size_t i = 0; i < values.size(); ++i) {
      // The absolute term covers cancellation in a rotation, after which the result is small
      // compared with the two elements of its pair.
      const double allowed = Storage<T>::unit * (std::abs(values[i]) + (sizeof(T) == 4 ? 8 : 0));
      const double error = std::abs(values[i] - to_float(got[i]));
      ASSERT_LE(error, allowed) << name << '[' << i << "], seed " << seed;
    }
  }
};

template <class T>
class AppendValues : public testing::Test {};
using Types = testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(AppendValues, Types);

template <class T>
void check(uint32_t seed, const Parallel& parallel) {
  Case<T> c(seed);
  const tilewise_kv_append& a = c.a;
  Expected<T> q(c.q), k(c.k_cache), v(c.v_cache);
  for (int64_t b = 0; b < a.batch; ++b) {
    const auto sequence = static_cast<size_t>(b);
    const int64_t first_q = c.packed_q ? c.cu_q[sequence] : b * a.seqlen_q;
    const int64_t rows_q = c.cu_q[sequence + 1] - c.cu_q[sequence];
    for (int64_t r = 0; r < rows_q; ++r) {
      const int64_t position = c.position(b) + (a.q_single_position ? 0 : r);
      for (int64_t i = 0; i < a.heads_q * a.head_dim; ++i) {
        const int64_t row = (first_q + r) * a.heads_q * a.head_dim;
        const T* head = c.q.data() + row + i / a.head_dim * a.head_dim;
        q.at(row + i) = c.rotated(head, i % a.head_dim, position);
      }
    }
    const int64_t first_new = c.packed_new ? c.cu_new[sequence] : b * a.seqlen_new;
    const int64_t rows_new = c.cu_new[sequence + 1] - c.cu_new[sequence];
    for (int64_t r = 0; r < rows_new; ++r) {
      const int64_t from = (first_new + r) * a.heads_kv;
      const int64_t to = c.cache_row(b, c.lengths[sequence] + r) * a.heads_kv;
      for (int64_t h = 0; h < a.heads_kv; ++h) {
        for (int64_t i = 0; i < a.head_dim; ++i) {
          const T* head = c.k_new.data() + (from + h) * a.head_dim;
          k.at((to + h) * a.head_dim + i) = c.rotated(head, i, c.position(b) + r);
        }
        for (int64_t i = 0; i < a.head_dim_v; ++i) {
          const auto at = static_cast<size_t>((from + h) * a.head_dim_v + i);
          v.at((to + h) * a.head_dim_v + i) = to_float(c.v_new[at]);
        }
      }
    }
  }
  tilewise::cpu::append_kv(a, parallel);
  q.compare(c.q_out, "q_out", seed);
  k.compare(c.k_cache, "k_cache", seed);
  v.compare(c.v_cache, "v_cache", seed);
  // In place, the rotation must read both elements of a pair before it writes one.
  Case<T> same(seed);
  same.a.q_out = same.a.q;
  tilewise::cpu::append_kv(same.a, parallel);
  q.compare(same.q, "q in place", seed);
}

TYPED_TEST(AppendValues, EveryElementMatchesTheDefinition) {
  const Parallel one_by_one{backwards, nullptr, 1};
  for (uint32_t seed = 0; seed < 300; ++seed) check<TypeParam>(seed, one_by_one);
}

// Enough rows for several tasks: no row may be lost or repeated.
TYPED_TEST(AppendValues, NumberOfTasksDoesNotChangeTheResult) {
  const Parallel pool = tilewise::make_parallel(nullptr);
  const int64_t rows = 700, heads = 2, columns = 64, half = columns / 2;
  Random random{std::mt19937(1)};
  const auto q = noise<TypeParam>(random, rows * heads * columns);
  const auto cosine = noise<TypeParam>(random, rows * half);
  const auto sine = noise<TypeParam>(random, rows * half);
  std::vector<int32_t> cu_seqlens = {0, 3, 3, 512, 690}, lengths = {0, 0, 7, 9};
  const auto run = [&](const Parallel& parallel) {
    auto q_out = noise<TypeParam>(random, rows * heads * columns);
    tilewise_kv_append a{};
    a.dtype = Storage<TypeParam>::dtype;
    a.batch = 4;
    a.seqlen_q = a.seqlen_new = rows;
    a.seqlen_k = 600;
    a.heads_q = a.heads_kv = heads;
    a.head_dim = a.head_dim_v = a.rotary_dim = columns;
    std::vector<TypeParam> caches(static_cast<size_t>(2 * 4 * 600 * heads * columns));
    const int64_t row = heads * columns;
    a.q = a.k_new = a.v_new = {const_cast<TypeParam*>(q.data()), 0, row, columns};
    a.q_out = {q_out.data(), 0, row, columns};
    a.k_cache = {caches.data(), 600 * row, row, columns};
    a.v_cache = {caches.data() + caches.size() / 2, 600 * row, row, columns};
    a.cu_seqlens_q = a.cu_seqlens_new = cu_seqlens.data();
    a.cache_seqlens = lengths.data();
    a.rotary_cos = cosine.data();
    a.rotary_sin = sine.data();
    a.rotary_rows = rows;
    tilewise::cpu::append_kv(a, parallel);
    caches.insert(caches.end(), q_out.begin(), q_out.end());
    return caches;
  };
  const auto once = run({backwards, nullptr, 1});
  for (const int32_t threads : {2, 3, 16}) {
    for (const auto hook : {&backwards, pool.parallel_for}) {
      const auto again = run({hook, pool.user, threads});
      ASSERT_EQ(0, std::memcmp(once.data(), again.data(), once.size() * sizeof(TypeParam)));
    }
  }
}

}  // namespace
