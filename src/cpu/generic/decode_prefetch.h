// Software prefetch for decoding with vectors.
#pragma once

#include "cpu/generic/simd.h"
#include "cpu/generic/tasks.h"

namespace tilewise::cpu {
namespace {

// While the products wait for memory they fill the queues of the core, and no later loads are
// issued. Each cache line is therefore prefetched long before it is read. T: the storage type of K
// and V.
template <class T>
struct DecodePrefetch {
  // One row does little work per line, so the prefetches run ahead in the same tensor (Zen 5, bf16
  // D128, one thread: 31 GB/s; values prefetched while reading keys and vice versa 24, every other
  // line 20, none 19). Where heads lie side by side, a few keys of each head are read in turn, and
  // the distance must exceed the bytes of these keys.
  static constexpr int64_t kBytes = 8 * 1024;
  static constexpr int64_t kBytesOfHeads = 16 * 1024;
  static constexpr int64_t kBytesInReadOrder = 32 * 1024;
  // Several rows of one head: the values of a tile are prefetched while its keys are read, and the
  // keys of the next tile while its values are read. (Fraction of the speed of a plain read,
  // compared with the scheme for one row. AVX-512 on a Xeon, four rows: fp32 D64 0.99 and 0.89,
  // fp16 D128 0.93 and 0.84; Zen 5 bf16 D64 0.68 and 0.62.) The line is prefetched again, into the
  // L1 cache, a few keys before it is read.
  static constexpr int kNearKeys = 4;
  static constexpr int64_t kMaxKeys = 128;  // a tile
  static constexpr int64_t kLine = 64;      // bytes
  static constexpr int64_t kLineColumns = kLine / static_cast<int64_t>(sizeof(T));

  // Whether to prefetch into L1 or only into L2. Measured as fractions of the speed of a plain
  // read, L1 and L2: one row, Zen 4 bf16 D128 0.59 and 0.79, fp32 0.59 and 0.85; on Zen 5 L1 is 5
  // to 15 % faster. Several rows, a tile ahead: Zen 5 bf16 D128 two rows 0.69 and 0.62, four rows
  // 0.65 and 0.60; a Xeon fp16 two rows 0.77 and 0.86, fp32 D64 four rows 0.75 and 0.86.
  TILEWISE_FN static bool into_l1(const ForwardTask& task) {
    return task.core == Core::zen5 || (task.core == Core::usual && task.packed_rows.size() == 1);
  }

  // Whether to prefetch in the order of memory or in the order of the reads. Several rows read
  // several keys alternately (Zen 5, one thread, fractions of a plain read in memory order and in
  // read order: four rows of bf16 D128 0.72 and 0.60, D64 0.68 and 0.58; equal on a Xeon). One row
  // reads a few keys of one head, then of the next (Zen 5, eight heads, bf16 D128 0.80 and 0.59,
  // fp32 0.87 and 0.62; a Xeon fp32 D128 0.86 and 1.1, D64 0.88 and 0.98).
  TILEWISE_FN static bool in_order_of_memory(const ForwardTask& task) {
    return task.packed_rows.size() > 1 || (task.heads > 1 && task.core == Core::zen5);
  }

  // The prefetch distance in keys. With several heads it is at least the group of keys that is read
  // of one head before the next.
  TILEWISE_FN static int64_t distance(const ForwardTask& task, int64_t columns, int64_t group) {
    const int64_t row = task.heads * columns * static_cast<int64_t>(sizeof(T));
    if (task.heads == 1) return clamp(kBytes / row, kNearKeys, kMaxKeys);
    const bool in_order = in_order_of_memory(task);
    return clamp((in_order ? kBytesOfHeads : kBytesInReadOrder) / row, group, kMaxKeys);
  }

  // Prefetches into L1, or else L2. This must stay inline: GCC considers a function that only
  // prefetches free of side effects and drops calls to it.
  TILEWISE_FN static void prefetch(const T* at, bool into_l1) {
    if (into_l1)
      __builtin_prefetch(at, 0, 3);
    else
      __builtin_prefetch(at, 0, 2);
  }

  // Whether a read of kColumns from `column` on is the first of its cache line.
  template <int kColumns>
  TILEWISE_FN static bool is_new_line(int64_t column) {
    return kColumns >= kLineColumns || column % kLineColumns == 0;
  }

  // Each read of a row prefetches the same line of the row `distance` keys further on. A line is
  // prefetched twice if a read covers half of it, which costs less than a test (by 5 to
  // 9 % with AVX2 at D64).
  struct ReadOrderPrefetcher {
    const int64_t distance;
    const bool l1;

    TILEWISE_FN ReadOrderPrefetcher(const T* const*, int64_t, int64_t prefetch_distance,
                                    bool into_l1)
        : distance(prefetch_distance), l1(into_l1) {}

    template <int kColumns>
    TILEWISE_FN void prefetch_on_read(const T* const* rows, int64_t offset, int64_t column) const {
      if (sizeof(T) > 1 || is_new_line<kColumns>(column))
        prefetch(rows[distance] + offset + column, l1);
    }
  };

  // Each read prefetches the next line in memory order of the rows `upcoming`, `columns` of each.
  // kPrefetchNear: it also prefetches into L1 the line of the row a few keys after the one that is
  // read.
  template <bool kPrefetchNear>
  struct MemoryOrderPrefetcher {
    const T* const* row;
    const int64_t columns;
    const bool l1;
    const T* line;
    const T* end;

    TILEWISE_FN MemoryOrderPrefetcher(const T* const* upcoming, int64_t columns_of_row, int64_t,
                                      bool into_l1)
        : row(upcoming), columns(columns_of_row), l1(into_l1) {
      begin();
    }

    template <int kColumns>
    TILEWISE_FN void prefetch_on_read(const T* const* rows, int64_t offset, int64_t column) {
      if (!is_new_line<kColumns>(column)) return;
      if (line >= end) {
        ++row;
        begin();
      }
      prefetch(line, l1);
      line += kLineColumns;
      if (kPrefetchNear) __builtin_prefetch(rows[kNearKeys] + offset + column);
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
