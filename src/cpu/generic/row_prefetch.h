// Software prefetch of rows into the L2 cache, a few lines at a time between computations. The rows
// of one head are too far apart for the hardware prefetcher.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// Prefetches `count` rows of `heads` heads row by row, in memory order.
template <class T>
class LinePrefetcher {
 public:
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

  LinePrefetcher() = default;
  TILEWISE_FN LinePrefetcher(const T* const* rows, int64_t count, int64_t heads,
                             int64_t stride_head, int64_t columns)
      : row_(rows),
        end_(rows + count),
        heads_(heads),
        stride_head_(stride_head),
        columns_(columns) {}

  // Prefetches the next `lines` lines, or as many as are left.
  TILEWISE_FN void prefetch(int64_t lines) {
    for (int64_t i = 0; i < lines && row_ != end_; ++i) {
      __builtin_prefetch(*row_ + head_ * stride_head_ + column_, 0, 2);
      column_ += kLine;
      if (column_ < columns_) continue;
      column_ = 0;
      if (++head_ < heads_) continue;
      head_ = 0;
      ++row_;
    }
  }

 private:
  const T* const* row_ = nullptr;
  const T* const* end_ = nullptr;
  int64_t heads_ = 0;
  int64_t stride_head_ = 0;
  int64_t columns_ = 0;
  int64_t head_ = 0;
  int64_t column_ = 0;
};

// Prefetches `count` rows of one head within `calls` calls of prefetch().
template <class T>
class RowPrefetcher {
 public:
  RowPrefetcher() = default;
  TILEWISE_FN RowPrefetcher(const T* const* rows, int64_t count, int64_t columns, int64_t calls)
      : next_(rows, count, 1, 0, columns),
        lines_per_call_(ceil_div(count * ceil_div(columns, LinePrefetcher<T>::kLine), calls)) {}

  TILEWISE_FN void prefetch() { next_.prefetch(lines_per_call_); }

 private:
  LinePrefetcher<T> next_;
  int64_t lines_per_call_ = 0;
};

}  // namespace
}  // namespace tilewise::cpu
