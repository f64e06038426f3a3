// The query rows of a work item as vector lanes: their rows and heads, and the keys they see.
#pragma once

#include <type_traits>

#include "attention/dtypes.h"
#include "attention/online_softmax.h"
#include "attention/schedule.h"
#include "cpu/generic/simd.h"
#include "cpu/generic/tasks.h"

namespace tilewise::cpu {
namespace {

// One lane per packed row. Lanes past the last row repeat its band, so that an interior tile stays
// interior, and have zero operands.
struct Lanes : LaneScratch {
  int64_t count = 0;

  TILEWISE_FN void fill(const Problem& p, const Sequence& s, int64_t kv_head, Range packed_rows,
                        int64_t panel) {
    const Packing packing{group_size(p)};
    int64_t now = packing.row(packed_rows.begin);
    int64_t member =
        packing.head(packed_rows.begin);  // among the heads that share a key/value head
    count = packed_rows.size();
    for (int64_t lane = 0; lane < round_up(count, panel); ++lane) {
      row[lane] = now;
      head[lane] = kv_head * packing.group + member;
      if (lane + 1 < count && ++member == packing.group) {  // avoids a division per lane
        member = 0;
        ++now;
      }
      const Range keys = s.band.keys_of(row[lane]);
      begin[lane] = keys.begin;
      end[lane] = max(keys.begin, keys.end);
      Range& some = any[lane / panel];
      Range& every = all[lane / panel];
      if (lane % panel == 0) {
        some = every = {begin[lane], end[lane]};
      } else {
        // Bounds do not decrease with the row, and rows that see nothing have an empty range in
        // between, so the hull is an interval.
        some = {min(some.begin, begin[lane]), max(some.end, end[lane])};
        every = {max(every.begin, begin[lane]), min(every.end, end[lane])};
      }
    }
  }

  TILEWISE_FN Range all_lanes_any(int64_t panel) const {
    Range hull = any[0];
    for (int64_t i = 1; i < ceil_div(count, panel); ++i)
      hull = {min(hull.begin, any[i].begin), max(hull.end, any[i].end)};
    return hull;
  }

  // Bounds of W lanes relative to the first key of a tile.
  struct Bounds {
    I begin;
    I end;
    TILEWISE_FN I sees(int32_t key) const { return (begin <= key) & (end > key); }
  };
  TILEWISE_FN Bounds bounds(int64_t lane, Range keys) const {
    Bounds b;
    for (int i = 0; i < W; ++i) {
      b.begin[i] = static_cast<int32_t>(clamp(begin[lane + i] - keys.begin, 0, keys.size()));
      b.end[i] = static_cast<int32_t>(clamp(end[lane + i] - keys.begin, 0, keys.size()));
    }
    return b;
  }

  TILEWISE_FN bool panel_sees(int64_t index, Range keys) const {
    return !intersect(any[index], keys).empty();
  }
  TILEWISE_FN bool panel_covers(int64_t index, Range keys) const {
    return all[index].begin <= keys.begin && keys.end <= all[index].end;
  }
};

// Addresses of the rows of `view` that the lanes stand for; null past the last lane.
template <class T>
TILEWISE_FN void lane_rows(const T** rows, const Lanes& lanes, int64_t capacity, const Sequence& s,
                           const tilewise_tensor& view) {
  const T* data = static_cast<const T*>(view.data);
  for (int64_t lane = 0; lane < capacity; ++lane)
    rows[lane] = lane < lanes.count ? data + s.row_offset(view, lanes.row[lane]) +
                                          lanes.head[lane] * view.stride_head
                                    : nullptr;
}

TILEWISE_FN int64_t lse_index(const Problem& p, const Sequence& s, int64_t row, int64_t head) {
  return s.lse_offset(p.lse_stride_batch, row) + head * p.lse_stride_head;
}

TILEWISE_FN int64_t lse_tangent_index(const Tangents& t, const Sequence& s, int64_t row,
                                      int64_t head) {
  return s.lse_offset(t.lse_stride_batch, row) + head * t.lse_stride_head;
}

TILEWISE_FN LogSum log_sum_of(const Problem& p, const Sequence& s, int64_t row, int64_t head) {
  const int64_t at = lse_index(p, s, row, head);
  return {p.lse[at], p.lse_low != nullptr ? p.lse_low[at] : 0.0f};
}

// Writes lse, and lse_low if the caller wants it, of a row.
TILEWISE_FN void write_lse(const Problem& p, const Sequence& s, int64_t row, int64_t head,
                           float lse, float low) {
  if (p.lse == nullptr) return;
  const int64_t at = lse_index(p, s, row, head);
  p.lse[at] = lse;
  if (p.lse_low != nullptr) p.lse_low[at] = low;
}

// Calls body(std::type_identity<Out>{}), where Out is the type of an element of out: T, that of q,
// unless the caller wants float32. Out is chosen at run time, where a tile is stored, so there are
// no kernels for it.
template <class T, class Body>
TILEWISE_FN void with_out_type(const Problem& p, const Body& body) {
  if constexpr (!std::is_same_v<T, float>)
    if (dtypes_of(p).out == TILEWISE_FLOAT32) return body(std::type_identity<float>{});
  body(std::type_identity<T>{});
}

// Writes columns[column][lane] * factor as rows: lane i goes to out[i], unless that is null.
template <class T>
TILEWISE_FN void store_lanes(T* const* out, int64_t lanes, const float* columns, int64_t ld,
                             int64_t count, F factor) {
  for (int64_t c = 0; c < count; c += W) {
    const int64_t now = min<int64_t>(W, count - c);
    F block[W];
    for (int i = 0; i < W; ++i) block[i] = i < now ? load(columns + (c + i) * ld) * factor : F{};
    transpose(block);
    for (int64_t i = 0; i < lanes; ++i) {
      if (out[i] == nullptr) continue;
      if (now == W)
        from_fp32(out[i] + c, block[i]);
      else
        from_fp32_tail(out[i] + c, block[i], now);
    }
  }
}

// Addresses of keys [keys.begin, keys.end) of one head, then nulls up to `capacity`.
template <class T>
TILEWISE_FN void key_rows(const T** rows, Range keys, int64_t capacity, const KvSource& source,
                          const tilewise_tensor& view, int64_t head) {
  const T* data = static_cast<const T*>(view.data) + head * view.stride_head;
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t run = source.run(key, keys.end);
    const T* first = data + source.offset(view, key);
    for (int64_t i = 0; i < run; ++i) rows[key - keys.begin + i] = first + i * view.stride_row;
    key += run;
  }
  for (int64_t i = keys.size(); i < capacity; ++i) rows[i] = nullptr;
}

// The same for a float8_e4m3 cache. T represents its values exactly; they are converted into
// `wide`.
template <class T>
TILEWISE_FN void wide_key_rows(const T** rows, const WideScratch& wide, Range keys,
                               int64_t capacity, const KvSource& source,
                               const tilewise_tensor& view, int64_t head, int64_t columns) {
  constexpr int64_t kPrefetchDistance = 12;  // rows are too far apart for the hardware prefetcher
  const Float8** const from = wide.from;
  key_rows(from, keys, keys.size(), source, view, head);
  for (int64_t r = 0; r < keys.size(); ++r) {
    if (r + kPrefetchDistance < keys.size())
      for (int64_t c = 0; c < columns; c += 64)
        __builtin_prefetch(from[r + kPrefetchDistance] + c, 0, 2);
    T* const to = reinterpret_cast<T*>(wide.rows) + r * wide.ld;
    int64_t c = 0;
    for (; c + W <= columns; c += W) from_fp32(to + c, to_fp32(from[r] + c));
    if (c < columns) from_fp32_tail(to + c, to_fp32_tail(from[r] + c, columns - c), columns - c);
    rows[r] = to;
  }
  for (int64_t r = keys.size(); r < capacity; ++r) rows[r] = nullptr;
}

// Addresses of keys or values in the dtype of q, whatever their storage, then nulls up to
// `capacity`.
template <class T>
TILEWISE_FN void keys_of(const T** rows, const WideScratch& wide, Range keys, int64_t capacity,
                         const Problem& p, const Sequence& s, const tilewise_tensor& view,
                         int64_t kv_head, int64_t columns) {
  if constexpr (sizeof(T) == sizeof(*wide.rows)) {
    if (p.kv_float8 != 0)
      return wide_key_rows(rows, wide, keys, capacity, s.kv, view, kv_head, columns);
  }
  key_rows(rows, keys, capacity, s.kv, view, kv_head);
}

// 0 * x is NaN exactly when x is not finite.
template <class T>
TILEWISE_FN bool row_is_finite(const T* row, int64_t columns) {
  F zero{};
  int64_t i = 0;
  for (; i + W <= columns; i += W) zero = zero + to_fp32(row + i) * 0.0f;
  if (i < columns) zero = zero + to_fp32_tail(row + i, columns - i) * 0.0f;
  return !any(zero != zero);
}

// A weight of 0 times an infinity is NaN and would contaminate rows that do not see the key. Where
// a tile is masked, rows with Inf or NaN are therefore replaced by zeros in the product (null) and
// listed in `removed`; the caller adds them where a weight is not 0. Returns how many there are.
template <class T>
TILEWISE_FN int64_t remove_nonfinite_rows(const T** rows, int64_t count, int64_t columns,
                                          const RowScratch& removed) {
  int64_t found = 0;
  for (int64_t r = 0; r < count; ++r) {
    if (rows[r] == nullptr || row_is_finite(rows[r], columns)) continue;
    removed.index[found] = static_cast<int32_t>(r);
    removed.address[found++] = rows[r];
    rows[r] = nullptr;
  }
  return found;
}

}  // namespace
}  // namespace tilewise::cpu
