// Copies of rows from global memory into a swizzled shared-memory tile, by all threads of a CTA.
#pragma once

#include <concepts>

#include "base/math.h"
#include "cuda/element.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/tile/shared_tile.h"

namespace tilewise::cuda::tile {

// Copies 16 bytes from `from`, which is 16-byte aligned, if `bytes_read` is 16, and stores zeros if
// it is 0. With cp.async (sm_80) the copy is asynchronous, and visible after `wait` and a barrier.
template <class Arch>
TILEWISE_DEVICE void copy_chunk(ptx::SharedAddress to, const void* from, int bytes_read) {
  if constexpr (Arch::kAsyncCopy) {
    ptx::cp_async_16(to, from, bytes_read);
  } else {
    uint32_t x[4] = {0, 0, 0, 0};
    if (bytes_read != 0) ptx::ld_global_v4_b32(x, from);
    ptx::st_shared_v4_b32(to, x);
  }
}

// The same, synchronously, for `count` elements at any alignment (0 <= count <= 16 /
// Element::kBytes).
template <class Element>
TILEWISE_DEVICE void copy_elements(ptx::SharedAddress to, const typename Element::Storage* from,
                                   int count) {
  uint32_t x[4] = {0, 0, 0, 0};
  constexpr int kPerWord = 4 / Element::kBytes;
#pragma unroll
  for (int i = 0; i < 4 * kPerWord; ++i) {
    if (i >= count) continue;
    if constexpr (kPerWord == 1)
      x[i] = ptx::bits_of(from[i]);
    else
      x[i / kPerWord] |= static_cast<uint32_t>(from[i].bits) << (i % kPerWord * (32 / kPerWord));
  }
  ptx::st_shared_v4_b32(to, x);
}

// Stores the first `count` of the elements in `x`, 16 bytes of registers, at any alignment.
template <class Element>
TILEWISE_DEVICE void store_elements(void* to, const uint32_t (&x)[4], std::integral auto count) {
  constexpr int kPerWord = 4 / Element::kBytes;
#pragma unroll
  for (int i = 0; i < 4 * kPerWord; ++i) {
    if (i >= count) continue;
    if constexpr (kPerWord == 2)
      static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(x[i / 2] >> (i % 2 * 16));
    else
      static_cast<uint32_t*>(to)[i] = x[i];
  }
}

template <class Arch>
TILEWISE_DEVICE void commit() {
  if constexpr (Arch::kAsyncCopy) ptx::cp_async_commit_group();
}
template <class Arch, int kPending>
TILEWISE_DEVICE void wait() {
  if constexpr (Arch::kAsyncCopy) ptx::cp_async_wait_group<kPending>();
}

// The 16-byte chunks that a thread copies of a tile of kRows rows: kPasses rows, kRowsPerPass
// apart, and in each of them kColumns chunks, kStride chunks apart. kStride is a power of 2, so
// rows of 96 or 192 elements need no division, and the swizzle of a thread's chunks differs by an
// immediate. With a smaller kMaxStride a thread has more columns and fewer rows.
template <int kThreads, int kRows, int kRowBytes_, int kMaxStride = kThreads>
struct CopyLanes {
  static constexpr int kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStride = min(kChunks & -kChunks, kMaxStride);
  static constexpr int kColumns = kChunks / kStride;
  static constexpr int kRowsPerPass = kThreads / kStride;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr bool kWhole = kRows % kRowsPerPass == 0;  // every thread takes every pass
  static constexpr int kPeriod = Swizzle<kRowBytes>::kPeriod;
  static_assert(kThreads % kStride == 0 && (kRowsPerPass & (kRowsPerPass - 1)) == 0);
  static_assert(kRowsPerPass % (8 / kPeriod) == 0);

  int row;         // in pass 0
  int chunk;       // in column 0
  uint32_t first;  // byte offset of that chunk

  TILEWISE_DEVICE explicit CopyLanes(int thread)
      : row(static_cast<int>(static_cast<unsigned>(thread) / kStride)),
        chunk(static_cast<int>(static_cast<unsigned>(thread) % kStride)),
        first(Swizzle<kRowBytes>::offset(row, chunk)) {}

  // Distance in rows from pass 0.
  TILEWISE_DEVICE static constexpr int rows_to(int pass) { return pass * kRowsPerPass; }
  TILEWISE_DEVICE int row_of(int pass) const { return row + rows_to(pass); }
  TILEWISE_DEVICE int chunk_of(int column) const { return chunk + column * kStride; }
  TILEWISE_DEVICE bool has(int pass) const { return kWhole || row_of(pass) < kRows; }
  // The pass number changes other bits of the row than the thread does, so xor combines the two.
  TILEWISE_DEVICE uint32_t offset(int pass, int column) const {
    const int permuted = (pass * kRowsPerPass / (8 / kPeriod)) & (kPeriod - 1);
    return (first ^ static_cast<uint32_t>(permuted * 16)) +
           static_cast<uint32_t>(pass * kRowsPerPass * kRowBytes + column * kStride * 16);
  }
};

// The same interface for pairs of adjacent rows: in a round of two passes a thread copies both rows
// of a pair, one per pass, into 16 bytes per pass that it alone uses. So it reads what it copied
// without a barrier.
template <int kThreads, int kRows, int kRowBytes>
struct PairLanes {
  static constexpr int kStride = kRowBytes / 16;
  static constexpr int kColumns = 1;
  static constexpr int kPairsPerRound = kThreads / kStride;
  static constexpr int kPasses = kRows / kPairsPerRound;
  static constexpr int kRounds = kPasses / 2;
  static_assert(kThreads % kStride == 0 && kRows % (2 * kPairsPerRound) == 0);

  int row;
  int chunk;
  uint32_t first;

  TILEWISE_DEVICE explicit PairLanes(int thread)
      : row(thread / kStride * 2),
        chunk(thread % kStride),
        first(static_cast<uint32_t>(thread * 16)) {}

  TILEWISE_DEVICE static constexpr int rows_to(int pass) {
    return pass / 2 * (2 * kPairsPerRound) + pass % 2;
  }
  TILEWISE_DEVICE int row_of(int pass) const { return row + rows_to(pass); }
  TILEWISE_DEVICE int chunk_of(int) const { return chunk; }
  TILEWISE_DEVICE bool has(int) const { return true; }
  TILEWISE_DEVICE uint32_t offset(int pass, int) const {
    return first + static_cast<uint32_t>(pass * kThreads * 16);
  }
};

}  // namespace tilewise::cuda::tile
