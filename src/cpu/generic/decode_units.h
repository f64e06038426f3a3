// The scores of decoding where K is an operand exactly as it lies in memory. A vector of q holds R
// rows of U units of 32 bits, and a load repeats U units of a key in each of the R blocks:
//
//   q    row 0: unit 0 .. U-1 | row 1: unit 0 .. U-1 | ...
//   k           unit 0 .. U-1 |        unit 0 .. U-1 | ...    one load, which repeats them
//
// The horizontal sum over lanes takes longer than the products of a key; this layout shares it
// between all rows. Where reading needs a conversion (fp16), blocks are twice as wide and a vector
// holds half of the rows: what was read is multiplied by two vectors of q.
#pragma once

#include "cpu/generic/decode_prefetch.h"
#include "cpu/generic/stream.h"

namespace tilewise::cpu {
namespace {

template <class T, int R>
struct UnitScores {
  using Reader = Stream<T>;
  using Read = typename Reader::Read;
  using Unit = typename Reader::Unit;
  static constexpr int kBlocks = Reader::kUnitBlocks;  // vectors of q for all rows
  static constexpr int kRows = R / kBlocks;            // per vector
  static constexpr int U = W / kRows;
  static constexpr int kColumns = U * Reader::kUnitColumns;  // per step
  // Keys that share one read of q and are read alternately. The sums of eight keys would not fit
  // into 16 registers.
  static constexpr int kKeys = W < 16 ? 4 : R == 4 ? 2 : 8;
  static constexpr int kStepsPerLine =
      max(1, static_cast<int>(DecodePrefetch<T>::kLine) / (kColumns * int{sizeof(T)}));
  static_assert(R % kBlocks == 0 && W % kRows == 0 && W % kKeys == 0);

  // Stores vector number `read` of a row of q in the order in which `dots` reads it.
  TILEWISE_FN static void place(Read* q, const Read& part, int64_t row, int64_t read) {
    constexpr int kUnits = sizeof(Read) / sizeof(uint32_t);
    uint32_t unit[kUnits];
    store_as(unit, part);
    auto* const to = reinterpret_cast<uint32_t*>(q + read * R);
    const int64_t lane = row / kRows * W + row % kRows * U;
    for (int i = 0; i < kUnits; ++i) to[i / U * kBlocks * W + lane + i % U] = unit[i];
  }

  // How many columns of a row `dots` prefetches.
  TILEWISE_FN static int64_t prefetch_columns(int64_t columns) {
    return columns / (kStepsPerLine * kColumns) * (kStepsPerLine * kColumns);
  }

  // Dot products of W keys with q, over `columns` columns that begin at `offset` in each key.
  template <class Prefetcher>
  TILEWISE_FN static void dots(F (&sums)[kBlocks][W], const Unit* q, const T* const* k,
                               Prefetcher& prefetcher, int64_t offset, int64_t columns) {
    const int64_t whole = columns / kColumns;
    for (int first = 0; first < W; first += kKeys) {
      const T* const* const key = k + first;
      F sum[kKeys][kBlocks] = {};
      int64_t c = 0;
      for (; c + kStepsPerLine <= whole; c += kStepsPerLine) {
        for (int n = 0; n < kKeys; ++n)
          prefetcher.template prefetch_on_read<kStepsPerLine * kColumns>(key + n, offset,
                                                                         c * kColumns);
        for (int i = 0; i < kStepsPerLine; ++i) add(sum, q, c + i, key, offset);
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

  // From sums per key, whose lanes are rows and units, to sums per row, whose lanes are keys.
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
  // Adds the products of step c: of one key, or of kKeys keys.
  TILEWISE_FN static void add(F (&sum)[kBlocks], const Unit* q, int64_t c, const T* from) {
    const Unit k = Reader::template read_repeated<U>(from);
    for (int b = 0; b < kBlocks; ++b) sum[b] = Reader::multiply_add(sum[b], q[c * kBlocks + b], k);
  }
  TILEWISE_FN static void add(F (&sum)[kKeys][kBlocks], const Unit* q, int64_t c, const T* const* k,
                              int64_t offset) {
    for (int n = 0; n < kKeys; ++n) add(sum[n], q, c, k[n] + offset + c * kColumns);
  }

  // Vector i holds a block of S lanes of every row; afterwards it holds all lanes of row i.
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
