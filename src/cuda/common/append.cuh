// tilewise_append_kv on a GPU, as src/cpu/append.cpp does it: q_out = rotary(q), and k_new (after
// rotary embedding) and v_new are written into the cache after the keys in use.
//
// A warp takes kAppendHeads heads of one row of q, of k_new or of v_new, in this order; grid
// append_blocks(a). Reads q, k_new, v_new, the rotary tables and the index arrays; writes q_out,
// k_cache and v_cache. With invalid index entries a key without a row in the cache is not written,
// and a row without a position in the rotary tables becomes NaN.
#pragma once

#include "attention/problem.h"
#include "base/float8.h"
#include "cuda/common/append.h"
#include "cuda/common/block.h"
#include "cuda/common/report.h"
#include "cuda/common/row_location.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// A row of q or of the new keys, and its sequence; the fields are those of RowLocation.
struct AppendRow {
  int64_t batch;
  int64_t index;
  int64_t batch_index;
  int64_t row;
  bool in_sequence;  // false after the last sequence

  TILEWISE_DEVICE static AppendRow of(int64_t flat, int64_t batch, int64_t rows_per_sequence,
                                      const int32_t* cu_seqlens) {
    if (cu_seqlens == nullptr) {
      const int64_t b = flat / rows_per_sequence;
      const int64_t i = flat - b * rows_per_sequence;
      return {b, i, b, i, true};
    }
    if (batch == 0) return {0, flat, 0, flat, false};
    const int64_t b = sequence_at(cu_seqlens, batch, flat);
    return {b, flat - cu_seqlens[b], 0, flat, cu_seqlens[b] <= flat && flat < cu_seqlens[b + 1]};
  }
  TILEWISE_DEVICE int64_t offset(const tilewise_tensor& view) const {
    return batch_index * view.stride_batch + row * view.stride_row;
  }
};

// 16 bytes of elements as floats.
template <class T>
struct Vector16 {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  float x[kCount];

  TILEWISE_DEVICE static Vector16 load(const T* from) {
    uint32_t words[4];
    ptx::ld_global_v4_b32(words, from);
    Vector16 vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4)
        vector.x[i] = ptx::float_of(words[i]);
      else
        vector.x[i] = to_float(T{static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))});
    }
    return vector;
  }
  TILEWISE_DEVICE void store(T* to) const {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4)
        words[i] = ptx::bits_of(x[i]);
      else
        words[i / 2] |= static_cast<uint32_t>(rounded<T>(x[i]).bits) << (i % 2 * 16);
    }
    ptx::st_global_v4_b32(to, words);
  }
};

// Moves a few heads of one row from `x` to `y`, which may be the same memory: every element, and
// both elements of a rotated pair, are read and written by the same lane.
template <class T>
struct MoveHeads {
  static constexpr int kPerVector = Vector16<T>::kCount;

  const T* x;
  int64_t x_stride;
  T* y;
  int64_t y_stride;
  int64_t heads;
  const T* cosine = nullptr;  // for the row's position; null: nothing is rotated
  const T* sine = nullptr;

  TILEWISE_DEVICE bool aligned() const {
    constexpr int64_t kSize = sizeof(T);
    return is_aligned(x, 16) && is_aligned(y, 16) &&
           (heads == 1 || (x_stride * kSize % 16 == 0 && y_stride * kSize % 16 == 0));
  }

  // Calls visit(x of the head, y of the head, i) for i in [0, count) of every head.
  template <class Visit>
  TILEWISE_DEVICE void for_each(int64_t count, const Visit& visit) const {
    const auto width = static_cast<uint32_t>(count);
    const auto total = static_cast<uint32_t>(heads) * width;
    for (uint32_t at = static_cast<uint32_t>(ptx::lane_index()); at < total; at += ptx::kWarpSize) {
      const uint32_t head = at / width;
      visit(x + head * x_stride, y + head * y_stride, static_cast<int64_t>(at - head * width));
    }
  }

  TILEWISE_DEVICE void copy(int64_t begin, int64_t end) const {
    if (x == y || begin >= end) return;
    int64_t whole = 0;
    if (aligned() && begin % kPerVector == 0) {
      whole = (end - begin) / kPerVector;
      for_each(whole, [&](const T* from, T* to, int64_t i) {
        uint32_t words[4];
        ptx::ld_global_v4_b32(words, from + begin + i * kPerVector);
        ptx::st_global_v4_b32(to + begin + i * kPerVector, words);
      });
    }
    const int64_t rest = begin + whole * kPerVector;
    for_each(end - rest, [&](const T* from, T* to, int64_t i) { to[rest + i] = from[rest + i]; });
  }

  TILEWISE_DEVICE void fill_with_nan(int64_t count) const {
    for_each(count,
             [](const T*, T* to, int64_t i) { to[i] = rounded<T>(ptx::float_of(0x7fc00000u)); });
  }

  TILEWISE_DEVICE static void rotate_pair(float a, float b, float c, float s, float* ya,
                                          float* yb) {
    *ya = a * c - b * s;
    *yb = a * s + b * c;
  }

  // Rotates the pairs (i, i + half).
  TILEWISE_DEVICE void rotate_halves(int64_t half) const {
    if (aligned() && half % kPerVector == 0 && is_aligned(cosine, 16) && is_aligned(sine, 16)) {
      for_each(half / kPerVector, [&](const T* from, T* to, int64_t vector) {
        const int64_t i = vector * kPerVector;
        Vector16<T> a = Vector16<T>::load(from + i);
        Vector16<T> b = Vector16<T>::load(from + half + i);
        const Vector16<T> c = Vector16<T>::load(cosine + i);
        const Vector16<T> s = Vector16<T>::load(sine + i);
#pragma unroll
        for (int j = 0; j < kPerVector; ++j) {
          rotate_pair(a.x[j], b.x[j], c.x[j], s.x[j], &a.x[j], &b.x[j]);
        }
        a.store(to + i);
        b.store(to + half + i);
      });
      return;
    }
    for_each(half, [&](const T* from, T* to, int64_t i) {
      float a, b;
      rotate_pair(to_float(from[i]), to_float(from[i + half]), to_float(cosine[i]),
                  to_float(sine[i]), &a, &b);
      to[i] = rounded<T>(a);
      to[i + half] = rounded<T>(b);
    });
  }

  // Rotates the pairs (2 i, 2 i + 1).
  TILEWISE_DEVICE void rotate_adjacent(int64_t half) const {
    if (aligned() && 2 * half % kPerVector == 0) {
      for_each(2 * half / kPerVector, [&](const T* from, T* to, int64_t vector) {
        Vector16<T> a = Vector16<T>::load(from + vector * kPerVector);
#pragma unroll
        for (int j = 0; j < kPerVector; j += 2) {
          const int64_t i = (vector * kPerVector + j) / 2;
          rotate_pair(a.x[j], a.x[j + 1], to_float(cosine[i]), to_float(sine[i]), &a.x[j],
                      &a.x[j + 1]);
        }
        a.store(to + vector * kPerVector);
      });
      return;
    }
    for_each(half, [&](const T* from, T* to, int64_t i) {
      float a, b;
      rotate_pair(to_float(from[2 * i]), to_float(from[2 * i + 1]), to_float(cosine[i]),
                  to_float(sine[i]), &a, &b);
      to[2 * i] = rounded<T>(a);
      to[2 * i + 1] = rounded<T>(b);
    });
  }
};

template <class Element>
struct Append {
  using T = typename Element::Storage;

  const tilewise_kv_append& a;
  IndexRecord* record;

  TILEWISE_DEVICE void report_once(const IndexFault& fault) const {
    if (ptx::lane_index() == 0) report(record, fault);
  }

  // Reports a fault of `cu_seqlens` at the sequence of a row. A row that lies before the last entry
  // and still in no sequence means that some entry is wrong: then all sequences are checked.
  TILEWISE_DEVICE void check_rows(const int32_t* cu_seqlens, const AppendRow& r, int64_t rows,
                                  Fault first) const {
    if (cu_seqlens == nullptr || a.batch == 0 || ptx::lane_index() != 0) return;
    const bool has_no_sequence = !r.in_sequence && r.row < cu_seqlens[a.batch];
    const int64_t end = has_no_sequence ? a.batch : r.batch + 1;
    for (int64_t b = has_no_sequence ? 0 : r.batch; b < end; ++b) {
      const IndexFault fault = cu_seqlens_fault(cu_seqlens, b, rows, first);
      if (!fault.any()) continue;
      report(record, fault);
      break;
    }
  }

  // Whether the rotary tables have a row for `position`, the one of row `index` of sequence b.
  TILEWISE_DEVICE bool has_position(int64_t b, int64_t position, int64_t index) const {
    if (position >= 0 && position < a.rotary_rows) return true;
    const int64_t start = position - index;
    report_once(start < 0 ? IndexFault{Fault::rotary_start, 0, b,
                                       a.rotary_seqlens != nullptr ? 1 : 0, start, 0}
                          : IndexFault{Fault::rotary_rows, 0, b, 0, position, a.rotary_rows});
    return false;
  }

  TILEWISE_DEVICE int64_t rotary_position(int64_t b) const {
    if (a.rotary_seqlens != nullptr) return a.rotary_seqlens[b];
    const int64_t keys = a.cache_seqlens != nullptr ? a.cache_seqlens[b] : 0;
    return a.leftpad_k != nullptr ? keys - a.leftpad_k[b] : keys;
  }

  TILEWISE_DEVICE void rotate(MoveHeads<T> move, int64_t b, int64_t index) const {
    const int64_t half = a.rotary_dim / 2;
    const int64_t position = rotary_position(b) + index;
    if (half > 0 && !has_position(b, position, index)) [[unlikely]]
      return move.fill_with_nan(a.head_dim);
    move.cosine = static_cast<const T*>(a.rotary_cos) + position * half;
    move.sine = static_cast<const T*>(a.rotary_sin) + position * half;
    if (a.rotary_interleaved != 0)
      move.rotate_adjacent(half);
    else
      move.rotate_halves(half);
    move.copy(a.rotary_dim, a.head_dim);
  }

  // Heads [head, head + kAppendHeads) of one row of both views, whose offsets are given.
  TILEWISE_DEVICE static MoveHeads<T> heads(const tilewise_tensor& from, int64_t from_row,
                                            const tilewise_tensor& to, int64_t to_row, int64_t head,
                                            int64_t count) {
    return {static_cast<const T*>(from.data) + from_row + head * from.stride_head, from.stride_head,
            static_cast<T*>(to.data) + to_row + head * to.stride_head, to.stride_head,
            min(int64_t{kAppendHeads}, count - head)};
  }

  TILEWISE_DEVICE void query(int64_t flat, int64_t head) const {
    const AppendRow r = AppendRow::of(flat, a.batch, a.seqlen_q, a.cu_seqlens_q);
    const MoveHeads<T> move =
        heads(a.q, r.offset(a.q), a.q_out, r.offset(a.q_out), head, a.heads_q);
    check_rows(a.cu_seqlens_q, r, a.seqlen_q, Fault::cu_seqlens_q_first);
    if (a.rotary_cos == nullptr || !r.in_sequence) return move.copy(0, a.head_dim);
    rotate(move, r.batch, a.q_single_position != 0 ? 0 : r.index);
  }

  // Where a key of a sequence lies in a cache.
  struct CacheLocation {
    int64_t batch_index;  // batch row, or page of a paged cache
    int64_t row;
    bool exists;

    TILEWISE_DEVICE int64_t offset(const tilewise_tensor& cache) const {
      return batch_index * cache.stride_batch + row * cache.stride_row;
    }
  };

  TILEWISE_DEVICE CacheLocation cached(const AppendRow& r) const {
    const bool paged = a.block_table != nullptr;
    const int64_t capacity = paged ? a.block_table_width * a.page_size : a.seqlen_k;
    const int64_t before = a.cache_seqlens != nullptr ? a.cache_seqlens[r.batch] : 0;
    const int64_t key = before + r.index;
    if (before < 0 || key >= capacity) {
      const int64_t rows = a.cu_seqlens_new == nullptr
                               ? a.seqlen_new
                               : int64_t{a.cu_seqlens_new[r.batch + 1]} - a.cu_seqlens_new[r.batch];
      report_once({Fault::cache_seqlens, 0, r.batch, rows, before, capacity});
      return {0, 0, false};
    }
    if (paged) {
      const int64_t i = key / a.page_size;
      const int64_t page = a.block_table[r.batch * a.block_table_stride + i];
      const bool exists = page >= 0 && page < a.pages;
      if (!exists) report_once({Fault::block_table, 0, r.batch, i, page, a.pages});
      return {page, key - i * a.page_size, exists};
    }
    const int64_t batch_row = a.kv_batch_idx != nullptr ? a.kv_batch_idx[r.batch] : r.batch;
    const bool exists = batch_row >= 0 && batch_row < a.kv_batch;
    if (!exists) report_once({Fault::kv_batch_idx, 0, r.batch, 0, batch_row, a.kv_batch});
    return {batch_row, key, exists};
  }

  // Column `e` of a head of new keys after rotary embedding.
  TILEWISE_DEVICE float rotated(const T* x, int64_t e, int64_t position) const {
    const int64_t half = a.rotary_dim / 2;
    if (a.rotary_cos == nullptr || half == 0) return to_float(x[e]);
    if (position < 0 || position >= a.rotary_rows) return ptx::float_of(0x7fc00000u);
    if (e >= a.rotary_dim) return to_float(x[e]);
    const bool adjacent = a.rotary_interleaved != 0;
    const int64_t i = adjacent ? e / 2 : e % half;
    const float c = to_float(static_cast<const T*>(a.rotary_cos)[position * half + i]);
    const float s = to_float(static_cast<const T*>(a.rotary_sin)[position * half + i]);
    float first, second;
    MoveHeads<T>::rotate_pair(to_float(x[adjacent ? 2 * i : i]),
                              to_float(x[adjacent ? 2 * i + 1 : i + half]), c, s, &first, &second);
    return (adjacent ? e % 2 == 0 : e < half) ? first : second;
  }

  // Writes into a float8_e4m3 cache, element by element: few bytes are written.
  TILEWISE_DEVICE void quantise(const AppendRow& r, const CacheLocation& location, int64_t first,
                                bool value) const {
    const tilewise_tensor& from = value ? a.v_new : a.k_new;
    const tilewise_tensor& to = value ? a.v_cache : a.k_cache;
    const int64_t columns = value ? a.head_dim_v : a.head_dim;
    const int64_t position = value ? 0 : rotary_position(r.batch) + r.index;
    if (!value && a.rotary_cos != nullptr && a.rotary_dim > 0)
      has_position(r.batch, position, r.index);
    const int64_t end = min(first + kAppendHeads, a.heads_kv);
    for (int64_t head = first; head < end; ++head) {
      const T* const x =
          static_cast<const T*>(from.data) + r.offset(from) + head * from.stride_head;
      Float8* const y = static_cast<Float8*>(to.data) + location.offset(to) + head * to.stride_head;
      const float factor = value ? v_descale(a, r.batch, head) : k_descale(a, r.batch, head);
      for (int64_t e = ptx::lane_index(); e < columns; e += ptx::kWarpSize) {
        const float element = value ? to_float(x[e]) : rotated(x, e, position);
        y[e] = from_float<Float8>(element / factor);
      }
    }
  }

  TILEWISE_DEVICE void key_or_value(int64_t flat, int64_t head, bool value) const {
    const AppendRow r = AppendRow::of(flat, a.batch, a.seqlen_new, a.cu_seqlens_new);
    check_rows(a.cu_seqlens_new, r, a.seqlen_new, Fault::cu_seqlens_new_first);
    if (!r.in_sequence) return;
    const CacheLocation location = cached(r);
    if (!location.exists) return;
    if constexpr (sizeof(T) == 2) {
      if (a.kv_float8 != 0) return quantise(r, location, head, value);
    }
    const tilewise_tensor& from = value ? a.v_new : a.k_new;
    const tilewise_tensor& to = value ? a.v_cache : a.k_cache;
    const MoveHeads<T> move =
        heads(from, r.offset(from), to, location.offset(to), head, a.heads_kv);
    if (value) return move.copy(0, a.head_dim_v);
    if (a.rotary_cos == nullptr) return move.copy(0, a.head_dim);
    rotate(move, r.batch, r.index);
  }

  TILEWISE_DEVICE void run(int64_t item) const {
    const int64_t q_groups = ceil_div(a.heads_q, kAppendHeads);
    const int64_t q_items = rotated_rows(a) * q_groups;
    if (item < q_items) return query(item / q_groups, item % q_groups * kAppendHeads);
    item -= q_items;
    const int64_t kv_groups = ceil_div(a.heads_kv, kAppendHeads);
    const int64_t items = appended_rows(a) * kv_groups;
    if (item >= 2 * items) return;
    const bool value = item >= items;
    if (value) item -= items;
    key_or_value(item / kv_groups, item % kv_groups * kAppendHeads, value);
  }
};

template <class Element>
TILEWISE_KERNEL(kAppendThreads, 1)
void append(TILEWISE_PARAMETER AppendParams params) {
  const Append<Element> append{params.append, params.index_record};
  append.run(ptx::block_index() * (kAppendThreads / ptx::kWarpSize) + ptx::warp_index());
}

}  // namespace tilewise::cuda::common
