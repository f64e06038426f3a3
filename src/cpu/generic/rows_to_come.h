// Rows that will be read later, asked for a few lines at a time beside computing, for the
// second-level cache. Rows of a head are too far from each other for the hardware to follow.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// Row by row the lines of `heads` heads of `count` rows, in the order they lie in memory.
template <class T>
class RowLines {
 public:
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

  RowLines() = default;
  TILEWISE_FN RowLines(const T* const* rows, int64_t count, int64_t heads, int64_t stride_head,
                       int64_t columns)
      : row_(rows),
        end_(rows + count),
        heads_(heads),
        stride_head_(stride_head),
        columns_(columns) {}

  // For so many lines, of those that are left.
  TILEWISE_FN void ask(int64_t lines) {
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

// `count` rows of a head: all of them after `turns` calls of ask().
template <class T>
class RowsToCome {
 public:
  RowsToCome() = default;
  TILEWISE_FN RowsToCome(const T* const* rows, int64_t count, int64_t columns, int64_t turns)
      : next_(rows, count, 1, 0, columns),
        of_turn_(ceil_div(count * ceil_div(columns, RowLines<T>::kLine), turns)) {}

  TILEWISE_FN void ask() { next_.ask(of_turn_); }

 private:
  RowLines<T> next_;
  int64_t of_turn_ = 0;
};

}  // namespace
}  // namespace tilewise::cpu
