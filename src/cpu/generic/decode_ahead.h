// What decoding in vectors asks for before it reads it.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// T: the storage of K and V.
template <class T>
struct Ahead {
  // Products that wait for memory fill the queues of the core, and then nobody asks for what comes
  // next. So as many keys as fit in this are asked for ahead, for the second-level cache ...
  static constexpr int64_t kBytes = 32 * 1024;
  static constexpr int64_t kMost = 128;  // keys: a tile
  // ... and again so many ahead, for the first level, where several rows share them (one query
  // head a key gains 5 % without, four lose 7 %).
  static constexpr int kNear = 4;
  static constexpr int64_t kLine = 64;  // bytes

  // `columns`: of a key, in all heads of a task.
  TILEWISE_FN static int64_t keys(int64_t columns) {
    return clamp(kBytes / (columns * static_cast<int64_t>(sizeof(T))), 4, kMost);
  }

  // Beside the read from `column` on; of float8 two to four reads are of one line. Never through a
  // call: GCC takes a function that only prefetches for one without effects, and drops it.
  template <int R>
  TILEWISE_FN static void ask(const T* const* rows, int64_t ahead, int64_t offset, int64_t column) {
    if (sizeof(T) == 1 && column % kLine != 0) return;
    __builtin_prefetch(rows[ahead] + offset + column, 0, 2);
    if (R > 1) __builtin_prefetch(rows[kNear] + offset + column);
  }
};

}  // namespace
}  // namespace tilewise::cpu
