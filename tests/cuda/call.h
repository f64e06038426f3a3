// Random problems with all their buffers: any layout of rows and keys with any options. Unused
// elements hold NaN, so that a kernel that reads them is detected.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/problem.h"
#include "base/half.h"

namespace cuda_test {

using tilewise::BFloat16;
using tilewise::from_float;
using tilewise::Gradients;
using tilewise::Half;
using tilewise::Problem;
using tilewise::Sequence;
using tilewise::to_float;

template <class T>
struct Type;
template <>
struct Type<float> {
  static constexpr int32_t kDtype = TILEWISE_FLOAT32;
  static constexpr double kEpsilon = 0x1p-23;
};
template <>
struct Type<Half> {
  static constexpr int32_t kDtype = TILEWISE_FLOAT16;
  static constexpr double kEpsilon = 0x1p-10;
};
template <>
struct Type<BFloat16> {
  static constexpr int32_t kDtype = TILEWISE_BFLOAT16;
  static constexpr double kEpsilon = 0x1p-7;
};

struct Random {
  std::mt19937 engine;

  int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  }
  bool coin() { return between(0, 1) == 1; }
  bool rarely() { return between(0, 3) == 0; }
  float normal() { return std::normal_distribution<float>()(engine); }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[between(0, static_cast<int64_t>(from.size()) - 1)];
  }
};

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T>
std::vector<T> filled(int64_t count, float x) {
  return std::vector<T>(static_cast<size_t>(std::max<int64_t>(count, 0)), from_float<T>(x));
}

// The limits of a random problem.
struct Limits {
  int64_t rows = 70;
  int64_t keys = 90;
  int64_t head_dim = 40;
  int64_t batch = 4;
};

template <class T>
struct Call {
  Random random;
  Limits limits;
  Problem p{};
  Gradients g{};
  std::vector<T> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse, dlse, bias, slopes, sinks, dbias, dsinks, dscale;
  std::vector<int32_t> cu_q, cu_k, used_q, used_k, table, index, leftpad, diagonals;
  float scale = 0;

  explicit Call(uint32_t seed, Limits wanted = {}) : random{std::mt19937(seed)}, limits(wanted) {
    draw_sizes();
    draw_sequences();
    draw_tensors();
    draw_options();
    draw_shard();
    draw_gradients();
  }

  bool paged() const { return p.block_table != nullptr; }

  void draw_sizes() {
    p.struct_size = sizeof(p);
    g.struct_size = sizeof(g);
    p.dtype = Type<T>::kDtype;
    p.batch = random.between(0, 9) == 0 ? 0 : random.between(1, limits.batch);
    p.kv_batch = p.batch;
    p.heads_kv = random.between(1, 3);
    p.heads_q = p.heads_kv * random.between(1, 3);
    p.head_dim = random.rarely() ? 8 * random.between(1, limits.head_dim / 8)
                                 : random.between(1, limits.head_dim);
    p.head_dim_v = random.coin() ? p.head_dim : random.between(1, limits.head_dim);
    p.seqlen_q = random.between(0, limits.rows);
    p.seqlen_k = random.between(0, limits.keys);
    p.window_left = random.rarely() ? random.between(0, limits.keys) : -1;
    p.window_right = random.coin() ? random.pick<int64_t>({0, 0, 3, 20}) : -1;
    p.heads_q_total = p.heads_q;
  }

  std::vector<int32_t> running_sum(int64_t maximum) {
    std::vector<int32_t> sum = {0};
    for (int64_t b = 0; b < p.batch; ++b)
      sum.push_back(sum.back() +
                    static_cast<int32_t>(random.rarely() ? 0 : random.between(0, maximum)));
    return sum;
  }

  // An array with one entry per sequence.
  template <class Entry>
  const int32_t* entries(std::vector<int32_t>& to, const Entry& entry) {
    to.clear();
    for (int64_t b = 0; b < p.batch; ++b) to.push_back(static_cast<int32_t>(entry(b)));
    to.push_back(0);  // not null even without sequences
    return to.data();
  }

  void draw_sequences() {
    if (random.coin()) {
      cu_q = running_sum(p.seqlen_q);
      p.cu_seqlens_q = cu_q.data();
      p.seqlen_q = cu_q.back() + random.between(0, 40);
    }
    if (random.coin())
      p.seqused_q = entries(
          used_q, [&](int64_t b) { return random.between(0, tilewise::query_rows(p, b).size()); });
    switch (random.between(0, 3)) {
      case 0:
        draw_pages();
        break;
      case 1:
        p.kv_batch = p.batch + random.between(1, 2);
        p.kv_batch_idx = entries(index, [&](int64_t) { return random.between(0, p.kv_batch - 1); });
        break;
      case 2:
        cu_k = running_sum(p.seqlen_k);
        p.cu_seqlens_k = cu_k.data();
        p.seqlen_k = cu_k.back() + random.between(0, 40);
        break;
      default:
        p.kv_batch = p.batch + (random.coin() ? random.between(0, 2) : 0);
    }
    const auto capacity = [&](int64_t b) {
      return p.cu_seqlens_k != nullptr ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]
                                       : tilewise::key_capacity(p);
    };
    if (random.coin())
      p.seqused_k = entries(used_k, [&](int64_t b) { return random.between(0, capacity(b)); });
    if (random.rarely())
      p.leftpad_k = entries(leftpad, [&](int64_t b) { return random.between(0, capacity(b)); });
  }

  void draw_pages() {
    p.page_size = random.pick<int64_t>({1, 3, 16});
    p.block_table_width = p.seqlen_k / p.page_size + 1;
    p.block_table_stride = p.block_table_width + random.between(0, 2);
    p.pages = p.batch * p.block_table_width + 1;
    table.resize(static_cast<size_t>(p.batch * p.block_table_stride + 1), 0);
    for (int32_t& page : table) page = static_cast<int32_t>(random.between(0, p.pages - 1));
    p.block_table = table.data();
  }

  // A view with the given sizes and sometimes gaps between heads, rows and batches.
  tilewise_tensor view(std::vector<T>& data, int64_t batches, int64_t rows, int64_t heads,
                       int64_t columns, float x) {
    const int64_t head = columns + (random.rarely() ? random.between(1, 8) : 0);
    const int64_t row = heads * head + (random.rarely() ? 8 : 0);
    const int64_t batch = rows * row + (random.rarely() ? 16 : 0);
    data = filled<T>(std::max<int64_t>(1, batches * batch), x);
    return {data.data(), batch, row, head};
  }

  tilewise_tensor rows_view(std::vector<T>& data, int64_t columns, float x) {
    const bool varlen = p.cu_seqlens_q != nullptr;
    return view(data, varlen ? 1 : p.batch, p.seqlen_q, p.heads_q, columns, x);
  }
  tilewise_tensor keys_view(std::vector<T>& data, int64_t columns) {
    if (paged()) return view(data, p.pages, p.page_size, p.heads_kv, columns, kNaN);
    return view(data, p.cu_seqlens_k != nullptr ? 1 : p.kv_batch, p.seqlen_k, p.heads_kv, columns,
                kNaN);
  }

  // Fills a row of all heads with normal numbers.
  void fill_row(T* row, int64_t stride_head, int64_t heads, int64_t columns) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t c = 0; c < columns; ++c)
        row[h * stride_head + c] = from_float<T>(random.normal());
  }

  void draw_tensors() {
    p.q = rows_view(q, p.head_dim, kNaN);
    p.k = keys_view(k, p.head_dim);
    p.v = keys_view(v, p.head_dim_v);
    p.out = rows_view(out, p.head_dim_v, kNaN);
    g.dout = rows_view(dout, p.head_dim_v, kNaN);
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = tilewise::sequence_of(p, b);
      for (int64_t i = 0; i < s.band.rows; ++i) {
        fill_row(q.data() + s.row_offset(p.q, i), p.q.stride_head, p.heads_q, p.head_dim);
        fill_row(dout.data() + s.row_offset(g.dout, i), g.dout.stride_head, p.heads_q,
                 p.head_dim_v);
      }
      for (int64_t j = 0; j < s.band.keys; ++j) {
        fill_row(k.data() + s.kv.offset(p.k, j), p.k.stride_head, p.heads_kv, p.head_dim);
        fill_row(v.data() + s.kv.offset(p.v, j), p.v.stride_head, p.heads_kv, p.head_dim_v);
      }
    }
    p.lse_stride_head = p.seqlen_q + random.between(0, 3);
    p.lse_stride_batch = p.heads_q * p.lse_stride_head;
    lse = filled<float>(lse_size(), kNaN);
    p.lse = lse.data();
  }

  int64_t lse_size() const {
    return std::max<int64_t>(1, p.lse_stride_batch * (p.cu_seqlens_q != nullptr ? 1 : p.batch));
  }

  std::vector<float> normals(int64_t count) {
    std::vector<float> values = filled<float>(count, 0.0f);
    for (float& value : values) value = random.normal();
    return values;
  }

  void draw_options() {
    scale = random.pick({1.0f, -1.0f}) / std::sqrt(static_cast<float>(p.head_dim));
    p.scale = scale;
    if (random.rarely()) p.scale_ptr = &scale;
    if (random.rarely()) p.softcap = 1.5f;
    if (random.coin()) {
      sinks = normals(p.heads_q);
      if (random.rarely()) sinks[0] = -std::numeric_limits<float>::infinity();
      p.sinks = sinks.data();
    }
    if (random.rarely()) {
      p.alibi_stride_batch = random.coin() ? p.heads_q : 0;
      slopes = normals(std::max<int64_t>(1, p.batch) * p.heads_q);
      for (float& slope : slopes) slope = 0.2f * std::abs(slope);
      p.alibi_slopes = slopes.data();
    }
    if (random.rarely()) {
      p.dropout_p = 0.3f;
      p.dropout_seed = random.engine();
      p.dropout_offset = random.engine();
    }
  }

  // Makes some problems shards of larger ones.
  void draw_shard() {
    if (random.rarely())
      p.diagonal = entries(diagonals, [&](int64_t) { return random.between(-40, 40); });
    if (!random.rarely()) return;
    p.row_offset = random.between(0, 1000);
    p.key_offset = random.coin() ? 16 * random.between(0, 60) : random.between(0, 1000);
    p.batch_offset = random.between(0, 3);
    p.head_offset = random.between(0, 3);
    p.heads_q_total = p.heads_q + p.head_offset + random.between(0, 3);
  }

  int64_t max_rows() const {
    int64_t maximum = p.cu_seqlens_q == nullptr ? p.seqlen_q : 0;
    for (int64_t b = 0; b < p.batch; ++b)
      maximum = std::max(maximum, tilewise::sequence_of(p, b).band.rows);
    return maximum;
  }
  int64_t max_keys() const {
    int64_t maximum = p.cu_seqlens_k == nullptr ? tilewise::key_capacity(p) : 0;
    for (int64_t b = 0; b < p.batch; ++b)
      maximum = std::max(maximum, tilewise::sequence_of(p, b).band.keys);
    return maximum;
  }

  // A bias that may be broadcast over batch, heads and rows, and its gradient.
  void add_bias() {
    g.dbias_rows = max_rows() + random.between(0, 3);
    g.dbias_keys = max_keys() + random.between(0, 3);
    const int64_t row = std::max<int64_t>(1, g.dbias_keys + random.between(0, 2));
    const int64_t head = std::max<int64_t>(1, row * g.dbias_rows);
    p.bias_stride_row = random.coin() ? row : 0;
    p.bias_stride_head = random.coin() ? head : 0;
    p.bias_stride_batch = random.coin() ? head * p.heads_q : 0;
    g.dbias_stride_row = p.bias_stride_row;
    g.dbias_stride_head = p.bias_stride_head;
    g.dbias_stride_batch = p.bias_stride_batch;
    p.bias_dtype = TILEWISE_FLOAT32;
    bias = normals(std::max<int64_t>(1, p.batch) * head * p.heads_q + row);
    p.bias = bias.data();
    dbias = filled<float>(static_cast<int64_t>(bias.size()), kNaN);
    g.dbias = dbias.data();
  }

  void draw_gradients() {
    g.dq = rows_view(dq, p.head_dim, kNaN);
    const bool per_sequence = paged() || p.kv_batch_idx != nullptr;
    const bool varlen = !per_sequence && p.cu_seqlens_k != nullptr;
    const int64_t batches = varlen ? 1 : per_sequence ? p.batch : p.kv_batch;
    g.dk = view(dk, batches, tilewise::key_capacity(p), p.heads_kv, p.head_dim, kNaN);
    g.dv = view(dv, batches, tilewise::key_capacity(p), p.heads_kv, p.head_dim_v, kNaN);
    if (random.coin()) {
      g.dlse_stride_head = p.lse_stride_head;
      g.dlse_stride_batch = p.lse_stride_batch;
      dlse = normals(lse_size());
      g.dlse = dlse.data();
    }
    if (p.sinks != nullptr) {
      dsinks = filled<float>(p.heads_q, kNaN);
      g.dsinks = dsinks.data();
    }
  }
};

}  // namespace cuda_test
