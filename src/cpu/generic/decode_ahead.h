// What decoding in vectors asks for before it reads it.
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// T: the storage of K and V.
template <class T>
struct Ahead {
  // Products that wait for memory fill the queues of the core, and then nobody asks for what comes
  // next. So each line is asked for into the first-level cache so many bytes before it is read, in
  // the order of reading and out of the same tensor (Zen 5, one row of bf16 D128, one thread: 30
  // GB/s; keys asked for beside values and the other way round 24, every other line 20, none 19).
  static constexpr int64_t kBytes = 8 * 1024;
  // ... Of heads that lie side by side one is read for a few keys, then the next one: what is asked
  // for has to be further away than those keys.
  static constexpr int64_t kBytesOfHeads = 32 * 1024;
  static constexpr int64_t kMost = 128;  // keys: a tile
  static constexpr int64_t kLine = 64;   // bytes

  // So many keys of `heads` times `columns`.
  TILEWISE_FN static int64_t keys(int64_t heads, int64_t columns) {
    const int64_t bytes = heads == 1 ? kBytes : kBytesOfHeads;
    return clamp(bytes / (heads * columns * static_cast<int64_t>(sizeof(T))), 4, kMost);
  }

  // Beside the read from `column` on; of float8 two to four reads are of one line. Never through a
  // call: GCC takes a function that only prefetches for one without effects, and drops it.
  TILEWISE_FN static void ask(const T* const* rows, int64_t ahead, int64_t offset, int64_t column) {
    if (sizeof(T) == 1 && column % kLine != 0) return;
    __builtin_prefetch(rows[ahead] + offset + column);
  }
};

}  // namespace
}  // namespace tilewise::cpu
