// Tiles in shared memory and their products: C[64][64] += A^T B. Both operands are stored with the
// contracted dimension first, so a thread reads its four rows of A and four columns of B as two
// vectors.
#pragma once

#include "base/float8.h"
#include "base/half.h"
#include "cuda/ptx/block.h"
#include "cuda/simt/config.h"

namespace tilewise::cuda::simt {

// Row stride of a tile in shared memory, in floats. The four extra floats let a warp store eight
// rows by four columns without a bank conflict, and rows stay 16-byte aligned.
inline constexpr int kRowStride = kTile + 4;

struct alignas(16) Float4 {
  float x[4];
};

// Thread (y, x) of the 16 x 16 threads of a CTA owns rows 4 y + i and columns 4 x + j of a result.
using Block = float[4][4];

struct ThreadPosition {
  int y;
  int x;

  TILEWISE_DEVICE static ThreadPosition of_this_thread() {
    return {ptx::thread_index() / 16, ptx::thread_index() % 16};
  }
};

TILEWISE_DEVICE void clear(Block& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = 0.0f;
  }
}

// Marks a row that does not exist. -1 would not do: offsets are negative in NumPy's reversed views.
inline constexpr int64_t kUnused = INT64_MIN;

// The rows of a tensor that make up a tile: the offset of each in elements. A row with offset
// kUnused reads as zeros.
template <class T>
struct Rows {
  const T* data;
  const int64_t* offset;  // [kTile], in shared memory
  int columns;

  TILEWISE_DEVICE float at(int row, int column) const {
    const int64_t from = offset[row];
    return from != kUnused && column < columns ? to_float(data[from + column]) : 0.0f;
  }
};

// Loads kChain columns from `column` on, transposed: to[column][row]. A warp reads eight columns of
// four rows at a time, which hit all banks of shared memory (and, in fp32, whole sectors of global
// memory if rows are aligned).
template <class T>
TILEWISE_DEVICE void load_transposed(float* to, const Rows<T>& rows, int column) {
  const int lane = ptx::lane_index();
  const int row = ptx::warp_index() * 8 + lane / 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = i % 4 * 8 + lane % 8;
    const int r = row + i / 4 * 4;
    to[c * kRowStride + r] = rows.at(r, column + c);
  }
}

// Loads kTile columns from `column` on: to[row][column].
template <class T>
TILEWISE_DEVICE void load_rows(float* to, const Rows<T>& rows, int column) {
  const int lane = ptx::lane_index();
#pragma unroll 8
  for (int i = 0; i < 16; ++i) {
    const int r = ptx::warp_index() * 8 + i / 2;
    const int c = i % 2 * 32 + lane;
    to[r * kRowStride + c] = rows.at(r, column + c);
  }
}

// c += A^T B over kChain rows of A and B. With kSkipZeros a weight of 0 in A ignores B even where B
// is NaN or infinite; otherwise 0 * NaN is NaN.
template <bool kSkipZeros>
TILEWISE_DEVICE void add_product(Block& c, const float* a, const float* b) {
  const ThreadPosition thread = ThreadPosition::of_this_thread();
  const float* const a_rows = a + thread.y * 4;
  const float* const b_columns = b + thread.x * 4;
  Block sum;
  clear(sum);
#pragma unroll 4
  for (int k = 0; k < kChain; ++k) {
    const Float4 u = *reinterpret_cast<const Float4*>(a_rows + k * kRowStride);
    const Float4 v = *reinterpret_cast<const Float4*>(b_columns + k * kRowStride);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kSkipZeros && u.x[i] == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += u.x[i] * v.x[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] += sum[i][j];
  }
}

// C += A B^T for the rows of two tensors. `stage` has room for kTile * kRowStride floats; it is
// overwritten only after all threads have called this function.
template <class A, class B>
TILEWISE_DEVICE void add_row_products(Block& c, float* stage, const Rows<A>& a, const Rows<B>& b) {
  float* const stage_b = stage + kChain * kRowStride;
  for (int column = 0; column < a.columns; column += kChain) {
    ptx::sync_block();
    load_transposed(stage, a, column);
    load_transposed(stage_b, b, column);
    ptx::sync_block();
    add_product<false>(c, stage, stage_b);
  }
}

// C = A B^T likewise: scores, or dP.
template <class A, class B>
TILEWISE_DEVICE void row_products(Block& c, float* stage, const Rows<A>& a, const Rows<B>& b) {
  clear(c);
  add_row_products(c, stage, a, b);
}

// sums[g] += W^T B for columns [kTile g, kTile g + kTile) of B. W[kTile][kTile] lies in shared
// memory; the threads of the CTA may have stored it just before, without a barrier. `skip_zeros` is
// the kSkipZeros of add_product.
template <int kGroups, class T>
TILEWISE_DEVICE void add_weighted(Block (&sums)[kGroups], const float* weights, float* stage,
                                  const Rows<T>& b, bool skip_zeros) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g * kTile >= b.columns) break;
    ptx::sync_block();
    load_rows(stage, b, g * kTile);
    ptx::sync_block();
#pragma unroll 1
    for (int k = 0; k < kTile; k += kChain) {
      if (skip_zeros)
        add_product<true>(sums[g], weights + k * kRowStride, stage + k * kRowStride);
      else
        add_product<false>(sums[g], weights + k * kRowStride, stage + k * kRowStride);
    }
  }
}

}  // namespace tilewise::cuda::simt
