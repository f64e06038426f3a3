// The scores of decoding where K is an operand as it lies in memory. A vector of q holds R rows of
// U units of 32 bits, and U units of a key are read into each of these R parts:
//
//   q    row 0: unit 0 .. U-1 | row 1: unit 0 .. U-1 | ...
//   k           unit 0 .. U-1 |        unit 0 .. U-1 | ...    one load, which repeats them
//
// so that adding up lanes, which takes longer than the products of a key, is done for all rows at
// once. Where reading a part costs a conversion (fp16), parts are twice as wide and a vector holds
// half of the rows: two vectors of q are multiplied by what was read.
#pragma once

#include "cpu/generic/decode_ahead.h"
#include "cpu/generic/stream.h"

namespace tilewise::cpu {
namespace {

template <class T, int R>
struct UnitScores {
  using Reader = Stream<T>;
  using Read = typename Reader::Read;
  using Unit = typename Reader::Unit;
  static constexpr int kBlocks = Reader::kUnitBlocks;  // vectors of q for all rows
  static constexpr int kRows = R / kBlocks;            // of a vector
  static constexpr int U = W / kRows;
  static constexpr int kColumns = U * Reader::kUnitColumns;  // of a step
  // That a read of q serves, and that are read in turns. Of 16 registers sums of eight keys take
  // too many.
  static constexpr int kKeys = W < 16 ? 4 : R == 4 ? 2 : 8;
  static constexpr int kStepsOfLine =
      max(1, static_cast<int>(Ahead<T>::kLine) / (kColumns * int{sizeof(T)}));
  static_assert(R % kBlocks == 0 && W % kRows == 0 && W % kKeys == 0);

  // Read `read` of a row, in the order of `dots`.
  TILEWISE_FN static void place(Read* q, const Read& part, int64_t row, int64_t read) {
    constexpr int kUnits = sizeof(Read) / sizeof(uint32_t);
    uint32_t unit[kUnits];
    store_as(unit, part);
    auto* const to = reinterpret_cast<uint32_t*>(q + read * R);
    const int64_t lane = row / kRows * W + row % kRows * U;
    for (int i = 0; i < kUnits; ++i) to[i / U * kBlocks * W + lane + i % U] = unit[i];
  }

  // What `dots` asks for of a row.
  TILEWISE_FN static int64_t asked(int64_t columns) {
    return columns / (kStepsOfLine * kColumns) * (kStepsOfLine * kColumns);
  }

  // Of W keys, `columns` from `offset` of their rows on.
  template <class Asks>
  TILEWISE_FN static void dots(F (&sums)[kBlocks][W], const Unit* q, const T* const* k, Asks& asks,
                               int64_t offset, int64_t columns) {
    const int64_t whole = columns / kColumns;
    for (int first = 0; first < W; first += kKeys) {
      const T* const* const key = k + first;
      F sum[kKeys][kBlocks] = {};
      int64_t c = 0;
      for (; c + kStepsOfLine <= whole; c += kStepsOfLine) {
        for (int n = 0; n < kKeys; ++n)
          asks.template beside<kStepsOfLine * kColumns>(key + n, offset, c * kColumns);
        for (int i = 0; i < kStepsOfLine; ++i) add(sum, q, c + i, key, offset);
      }
      for (; c < whole; ++c) add(sum, q, c, key, offset);
      if (const int64_t left = columns - whole * kColumns; left > 0) {
        for (int n = 0; n < kKeys; ++n) {
          const FirstElements<T, kColumns> rest(key[n] + offset + whole * kColumns, left);
          add(sum[n], q, whole, rest.data);
        }
      }
      for (int n = 0; n < kKeys; ++n)
        for (int b = 0; b < kBlocks; ++b) sums[b][first + n] = sum[n][b];
    }
  }

  // From sums of keys, whose lanes are rows and units, to those of rows, whose lanes are keys.
  TILEWISE_FN static void by_rows(F (&rows)[kRows], const F (&sums)[W]) {
    for (int group = 0; group < kRows; ++group) {
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
  // Step c of one key, and of several.
  TILEWISE_FN static void add(F (&sum)[kBlocks], const Unit* q, int64_t c, const T* from) {
    const Unit k = Reader::template read_repeated<U>(from);
    for (int b = 0; b < kBlocks; ++b) sum[b] = Reader::multiply_add(sum[b], q[c * kBlocks + b], k);
  }
  TILEWISE_FN static void add(F (&sum)[kKeys][kBlocks], const Unit* q, int64_t c, const T* const* k,
                              int64_t offset) {
    for (int n = 0; n < kKeys; ++n) add(sum[n], q, c, k[n] + offset + c * kColumns);
  }

  // Vector i has a block of S lanes of every row: it becomes that of row i.
  template <int S, int kStride = 1>
  TILEWISE_FN static void transpose_blocks(F (&r)[kRows]) {
    if constexpr (kStride < kRows) {
      for (int i = 0; i < kRows; ++i)
        if (!(i & kStride))
          detail::exchange<S>(r[i], r[i + kStride], std::make_integer_sequence<int, W>{});
      transpose_blocks<2 * S, 2 * kStride>(r);
    }
  }
};

}  // namespace
}  // namespace tilewise::cpu
