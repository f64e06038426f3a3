// The scores of decoding where K is an operand as it lies in memory. A vector of q holds R rows of
// U units of 32 bits, and U units of a key are read into each of these R parts:
//
//   q    row 0: unit 0 .. U-1 | row 1: unit 0 .. U-1 | ...
//   k           unit 0 .. U-1 |        unit 0 .. U-1 | ...    one load, which repeats them
//
// so that adding up lanes, which takes longer than the products of a key, is done for all rows at
// once.
#pragma once

#include "cpu/generic/decode_ahead.h"
#include "cpu/generic/stream.h"

namespace tilewise::cpu {
namespace {

template <class T, int R>
struct UnitScores {
  using Reader = Stream<T>;
  using Read = typename Reader::Read;
  static constexpr int U = W / R;
  static constexpr int kColumns = U * Reader::kUnitColumns;  // of a step
  // That a read of q serves, and that are read in turns (Zen 5, one thread, bf16 D128 from memory,
  // q k alone: four rows 29 GB/s with four keys, 32 with two or one; eight rows 18, 21, 25 and 30
  // with one, two, four and eight). Of 16 registers sums of eight keys take too many.
  static constexpr int kKeys = W < 16 ? 4 : R == 4 ? 2 : 8;
  static constexpr int kStepsOfLine =
      max(1, static_cast<int>(Ahead<T>::kLine) / (kColumns * int{sizeof(T)}));
  static_assert(W % R == 0 && W % kKeys == 0);

  // Read `read` of a row, in the order of `dots`.
  TILEWISE_FN static void place(Read* q, const Read& part, int64_t row, int64_t read) {
    uint32_t unit[W];
    store_as(unit, part);
    auto* const to = reinterpret_cast<uint32_t*>(q + read * R);
    for (int i = 0; i < W; ++i) to[i / U * W + row * U + i % U] = unit[i];
  }

  // Of W keys, `columns` from `offset` of their rows on; asks for as much of `coming`.
  TILEWISE_FN static void dots(F (&sums)[W], const Read* q, const T* const* k,
                               const T* const* coming, int64_t offset, int64_t columns) {
    const int64_t whole = columns / kColumns;
    for (int first = 0; first < W; first += kKeys) {
      const T* const* const key = k + first;
      F sum[kKeys] = {};
      int64_t c = 0;
      for (; c + kStepsOfLine <= whole; c += kStepsOfLine) {
        for (int n = 0; n < kKeys; ++n)
          Ahead<T>::template ask<R>(key + n, coming[first + n], offset, c * kColumns, false);
        for (int i = 0; i < kStepsOfLine; ++i) add(sum, q[c + i], key, offset + (c + i) * kColumns);
      }
      for (; c < whole; ++c) add(sum, q[c], key, offset + c * kColumns);
      if (const int64_t left = columns - whole * kColumns; left > 0) {
        for (int n = 0; n < kKeys; ++n) {
          const FirstElements<T, kColumns> rest(key[n] + offset + whole * kColumns, left);
          sum[n] = Reader::dot(sum[n], q[whole], Reader::template read_repeated<U>(rest.data));
        }
      }
      for (int n = 0; n < kKeys; ++n) sums[first + n] = sum[n];
    }
  }

  // From sums of keys, whose lanes are rows and units, to those of rows, whose lanes are keys.
  TILEWISE_FN static void by_rows(F (&rows)[R], const F (&sums)[W]) {
    for (int group = 0; group < R; ++group) {
      F part[U];
      for (int i = 0; i < U; ++i) part[i] = sums[group * U + i];
      if constexpr (U > 1)
        rows[group] = sum_of_rows<1>(part);
      else
        rows[group] = part[0];
    }
    transpose_blocks<U>(rows);
  }

 private:
  TILEWISE_FN static void add(F (&sum)[kKeys], const Read& q, const T* const* k, int64_t at) {
    for (int n = 0; n < kKeys; ++n)
      sum[n] = Reader::dot(sum[n], q, Reader::template read_repeated<U>(k[n] + at));
  }

  // Vector i has a block of S lanes of every row: it becomes that of row i.
  template <int S, int kStride = 1>
  TILEWISE_FN static void transpose_blocks(F (&r)[R]) {
    if constexpr (kStride < R) {
      for (int i = 0; i < R; ++i)
        if (!(i & kStride))
          detail::exchange<S>(r[i], r[i + kStride], std::make_integer_sequence<int, W>{});
      transpose_blocks<2 * S, 2 * kStride>(r);
    }
  }
};

}  // namespace
}  // namespace tilewise::cpu
