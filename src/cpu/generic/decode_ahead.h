// What decoding in vectors asks for before it reads it.
#pragma once

#include "cpu/generic/simd.h"
#include "cpu/generic/tasks.h"

namespace tilewise::cpu {
namespace {

// Products that wait for memory fill the queues of the core, and then nobody asks for what comes
// next. So each line is asked for long before it is read. T: the storage of K and V.
template <class T>
struct Ahead {
  // One row does little with a line: what comes next of the same tensor is asked for (Zen 5, bf16
  // D128, one thread: 31 GB/s; keys beside values and values beside keys 24, every other line 20,
  // none 19). Heads that lie side by side are read for a few keys each: what is asked for has to be
  // further away than those.
  static constexpr int64_t kBytes = 8 * 1024;
  static constexpr int64_t kBytesOfHeads = 16 * 1024;
  static constexpr int64_t kBytesInOrderOfReads = 32 * 1024;
  // Several rows of one head: values of a tile beside its keys and keys of the next one beside its
  // values (AVX-512 on a Xeon, four rows, of a plain read: fp32 D64 0.99, as one row does it 0.89,
  // fp16 D128 0.93 and 0.84; Zen 5 bf16 D64 0.68 and 0.62). And again a few keys before they are
  // read, into the first level.
  static constexpr int kNear = 4;
  static constexpr int64_t kMost = 128;  // keys: a tile
  static constexpr int64_t kLine = 64;   // bytes
  static constexpr int64_t kLineColumns = kLine / static_cast<int64_t>(sizeof(T));

  // Into the first-level cache, or else only into the second. Of a plain read of memory, first and
  // second: one row, Zen 4 bf16 D128 0.59 and 0.79, fp32 0.59 and 0.85; on Zen 5 the first level is
  // 5 to 15 % ahead. Several rows, a tile ahead: Zen 5 bf16 D128 two rows 0.69 and 0.62, four rows
  // 0.65 and 0.60; a Xeon fp16 two rows 0.77 and 0.86, fp32 D64 four rows 0.75 and 0.86.
  TILEWISE_FN static bool first_level(const ForwardTask& task) {
    return task.core == Core::zen5 || (task.core == Core::usual && task.packed_rows.size() == 1);
  }

  // Whether lines are asked for in the order of memory, or in that in which they are read. Several
  // rows read keys in turns (Zen 5, one thread, of a plain read, in the order of memory and of
  // reads: four rows of bf16 D128 0.72 and 0.60, D64 0.68 and 0.58; a Xeon level). One row reads a
  // few keys of a head, then those of the next one (Zen 5, eight heads, bf16 D128 0.80 and 0.59,
  // fp32 0.87 and 0.62; a Xeon fp32 D128 0.86 and 1.1, D64 0.88 and 0.98).
  TILEWISE_FN static bool in_order_of_memory(const ForwardTask& task) {
    return task.packed_rows.size() > 1 || (task.heads > 1 && task.core == Core::zen5);
  }

  // Keys to be asked for ahead in the tensor that is read: of several heads at least as many as one
  // reads before the next one does.
  TILEWISE_FN static int64_t keys(const ForwardTask& task, int64_t columns, int64_t group) {
    const int64_t row = task.heads * columns * static_cast<int64_t>(sizeof(T));
    if (task.heads == 1) return clamp(kBytes / row, kNear, kMost);
    const bool in_order = in_order_of_memory(task);
    return clamp((in_order ? kBytesOfHeads : kBytesInOrderOfReads) / row, group, kMost);
  }

  // Into the first level, or else the second. Never through a call: GCC takes a function that only
  // prefetches for one without effects, and drops it.
  TILEWISE_FN static void ask(const T* at, bool first_level) {
    if (first_level)
      __builtin_prefetch(at, 0, 3);
    else
      __builtin_prefetch(at, 0, 2);
  }

  // Whether a read of kColumns from `column` on is the first one of its line.
  template <int kColumns>
  TILEWISE_FN static bool is_new_line(int64_t column) {
    return kColumns >= kLineColumns || column % kLineColumns == 0;
  }

  // Beside reads of a row, the same line of the one that is `ahead` of it. Twice where a read is
  // half a line, which takes less than to tell (AVX2, D64: 5 to 9 %).
  struct InOrderOfReads {
    const int64_t ahead;
    const bool first;

    TILEWISE_FN InOrderOfReads(const T* const*, int64_t, int64_t keys_ahead, bool first_level)
        : ahead(keys_ahead), first(first_level) {}

    template <int kColumns>
    TILEWISE_FN void beside(const T* const* rows, int64_t offset, int64_t column) const {
      if (sizeof(T) > 1 || is_new_line<kColumns>(column)) ask(rows[ahead] + offset + column, first);
    }
  };

  // ... the next one in memory of rows `coming`, `columns` of each; kAsksNear: and that of the row
  // a few keys after the one that is read, into the first level.
  template <bool kAsksNear>
  struct InOrderOfMemory {
    const T* const* row;
    const int64_t columns;
    const bool first;
    const T* line;
    const T* end;

    TILEWISE_FN InOrderOfMemory(const T* const* coming, int64_t columns_of_row, int64_t,
                                bool first_level)
        : row(coming), columns(columns_of_row), first(first_level) {
      begin();
    }

    template <int kColumns>
    TILEWISE_FN void beside(const T* const* rows, int64_t offset, int64_t column) {
      if (!is_new_line<kColumns>(column)) return;
      if (line >= end) {
        ++row;
        begin();
      }
      ask(line, first);
      line += kLineColumns;
      if (kAsksNear) __builtin_prefetch(rows[kNear] + offset + column);
    }

   private:
    TILEWISE_FN void begin() {
      line = *row;
      end = line + columns;
    }
  };
};

}  // namespace
}  // namespace tilewise::cpu
