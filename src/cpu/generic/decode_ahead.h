// What decoding in vectors asks for before it reads it.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// Products that wait for memory fill the queues of the core, and then nobody asks for what comes
// next. So each line is asked for long before it is read. T: the storage of K and V.
template <class T>
struct Ahead {
  // One row does little with a line: what comes next of the same tensor is asked for, into the
  // first-level cache where the core takes it (Zen 5, bf16 D128, one thread: 31 GB/s; keys beside
  // values and values beside keys 24, every other line 20, none 19; asks_first_level). Heads that
  // lie side by side are read for a few keys each: what is asked for has to be further away than
  // those.
  static constexpr int64_t kBytes = 8 * 1024;
  static constexpr int64_t kBytesOfHeads = 32 * 1024;
  // Several rows: values of a tile beside its keys and keys of the next one beside its values, and
  // again a few keys before they are read, into the first level (AVX-512 on a Xeon, four rows, of a
  // plain read: fp32 D64 0.99, as one row does it 0.89, fp16 D128 0.93 and 0.84; Zen 5 bf16 D64
  // 0.68 and 0.62).
  static constexpr int kNear = 4;
  static constexpr int64_t kMost = 128;  // keys: a tile
  static constexpr int64_t kLine = 64;   // bytes
  static constexpr int64_t kLineColumns = kLine / static_cast<int64_t>(sizeof(T));

  // Keys for which one row asks ahead.
  TILEWISE_FN static int64_t keys(int64_t heads, int64_t columns) {
    const int64_t bytes = heads == 1 ? kBytes : kBytesOfHeads;
    return clamp(bytes / (heads * columns * static_cast<int64_t>(sizeof(T))), 4, kMost);
  }

  // A few keys before they are read.
  TILEWISE_FN static void near(const T* const* row, int64_t offset, int64_t column) {
    __builtin_prefetch(row[kNear] + offset + column);
  }

  // Lines of `columns` from `offset` of rows on. Never asked for through a call: GCC takes a
  // function that only prefetches for one without effects, and drops it.
  struct Walk {
    const T* const* row;
    const int64_t offset;
    const int64_t columns;
    const bool first_level;
    const T* line;
    const T* end;

    TILEWISE_FN Walk(const T* const* rows, int64_t offset_of_rows, int64_t some, bool first)
        : row(rows), offset(offset_of_rows), columns(some), first_level(first) {
      begin();
    }

    // Beside a read of kColumns from `column` of one of its rows on: once a line.
    template <int kColumns>
    TILEWISE_FN static bool is_new_line(int64_t column) {
      return kColumns >= kLineColumns || column % kLineColumns == 0;
    }

    // Rows are read one after the other: the same line of the row that is `ahead` of them. Twice
    // where a read is half a line, which takes less than to tell (AVX2, D64: 5 to 9 %).
    template <int kColumns>
    TILEWISE_FN void ask_beside(int64_t ahead, int64_t column) const {
      if (sizeof(T) > 1 || is_new_line<kColumns>(column)) ask(row[ahead] + offset + column);
    }

    // Rows are read in turns: in the order of memory all the same (Zen 5, one thread, of a plain
    // read, four rows of bf16 D128 0.72 and, in the order of what is read, 0.60; D64 0.68 and
    // 0.58).
    template <int kColumns>
    TILEWISE_FN void ask_next(int64_t column) {
      if (!is_new_line<kColumns>(column)) return;
      ask(line);
      line += kLineColumns;
      if (line < end) return;
      ++row;
      begin();
    }

   private:
    TILEWISE_FN void begin() {
      line = *row + offset;
      end = line + columns;
    }
    TILEWISE_FN void ask(const T* at) const {
      if (first_level)
        __builtin_prefetch(at, 0, 3);
      else
        __builtin_prefetch(at, 0, 2);
    }
  };
};

}  // namespace
}  // namespace tilewise::cpu
