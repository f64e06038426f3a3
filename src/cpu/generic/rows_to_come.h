// Rows that will be packed later, asked for a few lines at a time beside computing. Rows of a head
// are too far from each other for the hardware to follow, and packing them waits for every line.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

template <class T>
class RowsToCome {
 public:
  RowsToCome() = default;
  // `rows` of `columns` columns; all of them after `turns` calls of ask().
  TILEWISE_FN RowsToCome(const T* const* rows, int64_t count, int64_t columns, int64_t turns)
      : row_(rows), end_(rows + count), columns_(columns) {
    lines_ = ceil_div(count * ceil_div(columns, kLine), turns);
  }

  // For the second-level cache.
  TILEWISE_FN void ask() {
    for (int64_t i = 0; i < lines_ && row_ < end_; ++i) {
      __builtin_prefetch(*row_ + column_, 0, 2);
      column_ += kLine;
      if (column_ < columns_) continue;
      column_ = 0;
      ++row_;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  const T* const* row_ = nullptr;
  const T* const* end_ = nullptr;
  int64_t columns_ = 0;
  int64_t column_ = 0;
  int64_t lines_ = 0;  // of a turn
};

}  // namespace
}  // namespace tilewise::cpu
