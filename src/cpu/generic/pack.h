// Packing: rows of storage, at any address, become operands of a matrix engine. A null row stands
// for zeros.
//
// The contraction of a product runs either along the columns of a row (q.k, do.v: "columns") or
// from row to row (p v, p^T do, ds k, ds^T q: "rows"). Both have a plain and a transposed function.
#pragma once

#include "cpu/generic/simd.h"
#include "cpu/shape.h"

namespace tilewise::cpu {
namespace {

// W units of one row from `column` on, with the contraction along columns.
template <class E>
TILEWISE_FN typename E::Units units_of_row(const typename E::Storage* row, int64_t column,
                                           int64_t columns) {
  if (row == nullptr || column >= columns) return typename E::Units{};
  if (column + E::kPair * W <= columns) return E::along_columns(row + column);
  typename E::Storage first[E::kPair * W];
  copy_first(first, row + column, columns - column);
  return E::along_columns(first);
}

// W units from one row or a pair of rows, with the contraction from row to row.
template <class E>
TILEWISE_FN typename E::Units units_of_rows(const typename E::Storage* const* rows, int64_t column,
                                            int64_t columns) {
  typename E::Storage zeros[W] = {};
  typename E::Storage buffer[E::kPair][W];
  const typename E::Storage* from[E::kPair];
  for (int i = 0; i < E::kPair; ++i) {
    from[i] = rows[i] == nullptr || column >= columns ? zeros : rows[i] + column;
    if (column < columns && column + W > columns && rows[i] != nullptr) {
      copy_first(buffer[i], rows[i] + column, columns - column);
      from[i] = buffer[i];
    }
  }
  return E::along_rows(from);
}

// dst[row][unit]
template <class E>
void pack_columns(uint32_t* dst, int64_t ld, int64_t plane, const typename E::Storage* const* rows,
                  int64_t count, int64_t columns) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t u = 0; u < ld; u += W)
      E::store_units(dst + r * ld + u, plane, units_of_row<E>(rows[r], u * E::kPair, columns));
}

// dst[unit][row]: the `count` rows are the lanes; `count` is a multiple of W.
template <class E>
void pack_columns_transposed(uint32_t* dst, int64_t ld, int64_t plane,
                             const typename E::Storage* const* rows, int64_t count, int64_t columns,
                             int64_t units) {
  for (int64_t r = 0; r < count; r += W)
    for (int64_t u = 0; u < units; u += W) {
      typename E::Units block[W];
      for (int i = 0; i < W; ++i) block[i] = units_of_row<E>(rows[r + i], (u)*E::kPair, columns);
      E::transpose_units(block);
      for (int64_t i = 0; i < min<int64_t>(W, units - u); ++i)
        E::store_units(dst + (u + i) * ld + r, plane, block[i]);
    }
}

// dst[row / pair][column]; `count` is a multiple of pair.
template <class E>
void pack_rows(uint32_t* dst, int64_t ld, int64_t plane, const typename E::Storage* const* rows,
               int64_t count, int64_t columns) {
  for (int64_t r = 0; r < count; r += E::kPair)
    for (int64_t column = 0; column < ld; column += W)
      E::store_units(dst + r / E::kPair * ld + column, plane,
                     units_of_rows<E>(rows + r, column, columns));
}

// dst[column][row / pair]; count / pair is a multiple of W.
template <class E>
void pack_rows_transposed(uint32_t* dst, int64_t ld, int64_t plane,
                          const typename E::Storage* const* rows, int64_t count, int64_t columns,
                          int64_t padded_columns) {
  for (int64_t r = 0; r < count; r += W * E::kPair)
    for (int64_t column = 0; column < padded_columns; column += W) {
      typename E::Units block[W];
      for (int i = 0; i < W; ++i)
        block[i] = units_of_rows<E>(rows + r + i * E::kPair, column, columns);
      E::transpose_units(block);
      for (int i = 0; i < W; ++i)
        E::store_units(dst + (column + i) * ld + r / E::kPair, plane, block[i]);
    }
}

}  // namespace
}  // namespace tilewise::cpu
