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
  // Several rows: values of a tile beside its keys and keys of the next one beside its values, into
  // the second level, and again a few keys before they are read into the first one (AVX-512 on a
  // Xeon, four rows, of a plain read: fp32 D64 0.99, as one row does it 0.89, fp16 D128 0.93 and
  // 0.84; level on Zen 5).
  static constexpr int kNear = 4;
  static constexpr int64_t kMost = 128;  // keys: a tile
  static constexpr int64_t kLine = 64;   // bytes

  // Keys for which one row asks ahead.
  TILEWISE_FN static int64_t keys(int64_t heads, int64_t columns) {
    const int64_t bytes = heads == 1 ? kBytes : kBytesOfHeads;
    return clamp(bytes / (heads * columns * static_cast<int64_t>(sizeof(T))), 4, kMost);
  }

  // For a line of rows[0], which is read now, and one of `coming`; of float8 two to four reads are
  // of one line. first_level: read at R = 1. Never through a call: GCC takes a function that only
  // prefetches for one without effects, and drops it.
  template <int R>
  TILEWISE_FN static void ask(const T* const* rows, const T* coming, int64_t offset, int64_t column,
                              bool first_level) {
    if (sizeof(T) == 1 && column % kLine != 0) return;
    if (R == 1 && first_level)
      __builtin_prefetch(coming + offset + column, 0, 3);
    else
      __builtin_prefetch(coming + offset + column, 0, 2);
    if (R > 1) __builtin_prefetch(rows[kNear] + offset + column);
  }
};

}  // namespace
}  // namespace tilewise::cpu
