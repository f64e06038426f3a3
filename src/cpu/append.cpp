#include "cpu/append.h"

#include <cstring>
#include <type_traits>

#include "attention/dtypes.h"
#include "attention/problem.h"
#include "base/float8.h"
#include "base/half.h"
#include "base/math.h"

namespace tilewise::cpu {
namespace {

// Copying is bound by memory bandwidth: below about this many elements, waking a thread costs more
// than it saves.
constexpr int64_t elements_per_task = 16384;

// Visits the rows of a dense or variable-length tensor in order and tracks the sequence of each
// row.
class RowCursor {
 public:
  RowCursor(int64_t row, int64_t batch, int64_t rows_per_sequence, const int32_t* cu_seqlens)
      : batch_(batch), rows_per_sequence_(rows_per_sequence), cu_seqlens_(cu_seqlens) {
    if (!cu_seqlens_) {
      sequence_ = row / rows_per_sequence_;
      index_ = row % rows_per_sequence_;
      return;
    }
    int64_t low = 0, high = batch_;  // the last sequence that starts at or before `row`
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (cu_seqlens_[middle] <= row ? low : high) = middle;
    }
    sequence_ = low;
    index_ = row - cu_seqlens_[low];
    skip_ended();
  }

  // A row after the last sequence (legal with cu_seqlens) belongs to none.
  bool in_sequence() const { return sequence_ < batch_; }
  int64_t sequence() const { return sequence_; }
  int64_t index() const { return index_; }

  void next() {
    ++index_;
    if (cu_seqlens_) {
      skip_ended();
    } else if (index_ == rows_per_sequence_) {
      ++sequence_;
      index_ = 0;
    }
  }

 private:
  void skip_ended() {
    while (sequence_ < batch_ && index_ >= cu_seqlens_[sequence_ + 1] - cu_seqlens_[sequence_]) {
      index_ -= cu_seqlens_[sequence_ + 1] - cu_seqlens_[sequence_];
      ++sequence_;
    }
  }

  int64_t batch_;
  int64_t rows_per_sequence_;
  const int32_t* cu_seqlens_;
  int64_t sequence_ = 0;
  int64_t index_ = 0;
};

// cos and sin of one position, converted once for all heads.
struct Rotation {
  float cosine[kMaxHeadDim / 2];
  float sine[kMaxHeadDim / 2];

  template <class T>
  void load(const tilewise_kv_append& a, int64_t position) {
    const int64_t half = a.rotary_dim / 2;
    const T* c = static_cast<const T*>(a.rotary_cos) + position * half;
    const T* s = static_cast<const T*>(a.rotary_sin) + position * half;
    for (int64_t i = 0; i < half; ++i) {
      cosine[i] = to_float(c[i]);
      sine[i] = to_float(s[i]);
    }
  }
};

// Rotates one head of one row; x and y may be the same memory. The work goes through fp32 buffers
// that nothing aliases, in three plain loops, each of which the compiler vectorises; a loop that
// reads and writes 16-bit pairs in place takes about 3 times as long. `descale`: see copy_head.
template <class T, class Y>
void rotate_head(const T* x, Y* y, const Rotation& r, int64_t rotary_dim, bool interleaved,
                 float descale) {
  float in[kMaxHeadDim], out[kMaxHeadDim];
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < rotary_dim; ++i) in[i] = to_float(x[i]);
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      out[2 * i] = in[2 * i] * r.cosine[i] - in[2 * i + 1] * r.sine[i];
      out[2 * i + 1] = in[2 * i] * r.sine[i] + in[2 * i + 1] * r.cosine[i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      out[i] = in[i] * r.cosine[i] - in[i + half] * r.sine[i];
      out[i + half] = in[i] * r.sine[i] + in[i + half] * r.cosine[i];
    }
  }
  if constexpr (std::is_same_v<Y, Float8>) {
    for (int64_t i = 0; i < 2 * half; ++i) out[i] /= descale;
  }
  for (int64_t i = 0; i < 2 * half; ++i) y[i] = from_float<Y>(out[i]);
}

// y = x / descale, where descale is 1 unless y is float8_e4m3.
template <class T, class Y>
void copy_head(const T* x, Y* y, int64_t n, float descale) {
  if constexpr (std::is_same_v<T, Y>) {
    if (x != y) std::memcpy(y, x, static_cast<size_t>(n) * sizeof(T));
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<Y>(to_float(x[i]) / descale);
  }
}

// Appends rows of T to caches of Cached, which is T itself or Float8.
template <class T, class Cached>
class Append {
 public:
  explicit Append(const tilewise_kv_append& a) : a_(a) {}

  int64_t query_rows() const {
    if (!a_.q.data || !a_.q_out.data) return 0;
    return a_.cu_seqlens_q ? a_.seqlen_q : a_.batch * a_.seqlen_q;
  }

  int64_t new_rows() const {
    if (!a_.k_new.data) return 0;
    return a_.cu_seqlens_new ? a_.seqlen_new : a_.batch * a_.seqlen_new;
  }

  void queries(Range rows) const {
    if (rows.empty()) return;
    Rotation rotation;
    RowCursor cursor(rows.begin, a_.batch, a_.seqlen_q, a_.cu_seqlens_q);
    for (int64_t row = rows.begin; row < rows.end; ++row, cursor.next()) {
      const bool rotate = a_.rotary_cos && cursor.in_sequence();
      if (rotate) {
        const int64_t step = a_.q_single_position ? 0 : cursor.index();
        rotation.load<T>(a_, rotary_position(a_, cursor.sequence()) + step);
      }
      const T* x = source(a_.q, a_.cu_seqlens_q, cursor, row);
      T* y = const_cast<T*>(source(a_.q_out, a_.cu_seqlens_q, cursor, row));
      for (int64_t h = 0; h < a_.heads_q; ++h)
        head(x + h * a_.q.stride_head, y + h * a_.q_out.stride_head, rotate ? &rotation : nullptr,
             1.0f);
    }
  }

  void keys_and_values(Range rows) const {
    if (rows.empty()) return;
    Rotation rotation;
    RowCursor cursor(rows.begin, a_.batch, a_.seqlen_new, a_.cu_seqlens_new);
    for (int64_t row = rows.begin; row < rows.end; ++row, cursor.next()) {
      if (!cursor.in_sequence()) return;
      const int64_t b = cursor.sequence();
      const int64_t key = (a_.cache_seqlens ? a_.cache_seqlens[b] : 0) + cursor.index();
      if (a_.rotary_cos) rotation.load<T>(a_, rotary_position(a_, b) + cursor.index());
      const T* k = source(a_.k_new, a_.cu_seqlens_new, cursor, row);
      const T* v = source(a_.v_new, a_.cu_seqlens_new, cursor, row);
      Cached* k_cache = cached(a_.k_cache, b, key);
      Cached* v_cache = cached(a_.v_cache, b, key);
      const int64_t dv = a_.head_dim_v ? a_.head_dim_v : a_.head_dim;
      for (int64_t h = 0; h < a_.heads_kv; ++h) {
        head(k + h * a_.k_new.stride_head, k_cache + h * a_.k_cache.stride_head,
             a_.rotary_cos ? &rotation : nullptr, k_descale(a_, b, h));
        copy_head(v + h * a_.v_new.stride_head, v_cache + h * a_.v_cache.stride_head, dv,
                  v_descale(a_, b, h));
      }
    }
  }

 private:
  static const T* source(const tilewise_tensor& t, const int32_t* cu_seqlens,
                         const RowCursor& cursor, int64_t row) {
    const T* data = static_cast<const T*>(t.data);
    if (cu_seqlens) return data + row * t.stride_row;
    return data + cursor.sequence() * t.stride_batch + cursor.index() * t.stride_row;
  }

  Cached* cached(const tilewise_tensor& cache, int64_t b, int64_t key) const {
    Cached* data = static_cast<Cached*>(cache.data);
    if (a_.block_table) {
      const int64_t page = a_.block_table[b * a_.block_table_stride + key / a_.page_size];
      return data + page * cache.stride_batch + key % a_.page_size * cache.stride_row;
    }
    const int64_t batch_row = a_.kv_batch_idx ? a_.kv_batch_idx[b] : b;
    return data + batch_row * cache.stride_batch + key * cache.stride_row;
  }

  template <class Y>
  void head(const T* x, Y* y, const Rotation* rotation, float descale) const {
    const int64_t rotated = rotation ? a_.rotary_dim : 0;
    if (rotation) rotate_head(x, y, *rotation, rotated, a_.rotary_interleaved != 0, descale);
    copy_head(x + rotated, y + rotated, a_.head_dim - rotated, descale);
  }

  const tilewise_kv_append& a_;
};

template <class T, class Cached>
void run(const tilewise_kv_append& a, const Parallel& parallel) {
  const Append<T, Cached> append(a);
  const int64_t query_rows = append.query_rows();
  const int64_t rows = query_rows + append.new_rows();
  if (rows == 0) return;
  const int64_t elements =
      (query_rows * a.heads_q + 2 * append.new_rows() * a.heads_kv) * a.head_dim;
  const int64_t workers = max<int64_t>(parallel.threads, 1);
  const int64_t tasks = clamp(ceil_div(elements, elements_per_task), 1, min(workers, rows));
  // Query rows are numbered first; the contiguous range of rows of a task may contain both kinds.
  parallel.run(tasks, [&](int64_t task) {
    const Range rows_of_task{rows * task / tasks, rows * (task + 1) / tasks};
    append.queries(intersect(rows_of_task, {0, query_rows}));
    const Range keys = intersect(rows_of_task, {query_rows, rows});
    append.keys_and_values({keys.begin - query_rows, keys.end - query_rows});
  });
}

}  // namespace

void append_kv(const tilewise_kv_append& append, const Parallel& parallel) {
  const bool float8 = dtypes_of(append).kv == TILEWISE_FLOAT8_E4M3;
  switch (append.dtype) {
    case TILEWISE_FLOAT32:
      return run<float, float>(append, parallel);
    case TILEWISE_FLOAT16:
      return float8 ? run<Half, Float8>(append, parallel) : run<Half, Half>(append, parallel);
    case TILEWISE_BFLOAT16:
      return float8 ? run<BFloat16, Float8>(append, parallel)
                    : run<BFloat16, BFloat16>(append, parallel);
    default:
      return;  // rejected by the caller
  }
}

}  // namespace tilewise::cpu
