// Matrix products on the vector units, by fp32 FMA or by an instruction that multiplies pairs of
// bf16 (vdpbf16ps, bfdot).
#pragma once

#include "cpu/generic/simd.h"

namespace tilewise::cpu {
namespace {

// Operands consist of 32-bit units, each one fp32 number or a pair of bf16 numbers along the
// contraction; strides count units. `plane` is the distance from the high to the low part of
// operands that are stored in two parts.
struct OperandA {
  const uint32_t* data;
  int64_t row;
  int64_t unit;
  int64_t plane;
};
struct OperandB {
  const uint32_t* data;
  int64_t ld;
  int64_t plane;
};

struct Fma {
  static constexpr int kPair = 1;
  TILEWISE_FN static F multiply_add(F acc, U a, U b) {
    return acc + load_as<F>(&a) * load_as<F>(&b);
  }
};

#if defined(TILEWISE_BF16_DOT)
struct Dot {
  static constexpr int kPair = 2;
  TILEWISE_FN static F multiply_add(F acc, U a, U b) {
    return dot_bf16(acc, reinterpret_cast<H2>(a), reinterpret_cast<H2>(b));
  }
};
#endif

// One register block: R rows of C by V vectors. R * V accumulators, V vectors of B and one
// broadcast of A are live: 24 + 3 + 1 of 32 registers with AVX-512 and NEON, 12 + 3 + 1 of 16
// with AVX2.
template <class Op, int R, int V>
TILEWISE_FN void register_block(float* c, int64_t ldc, bool accumulate, const uint32_t* a,
                                int64_t a_row, int64_t a_unit, const uint32_t* b, int64_t ldb,
                                int64_t units) {
  F acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = F{};
  for (int64_t u = 0; u < units; ++u) {
    U column[V];
    for (int v = 0; v < V; ++v) column[v] = load_as<U>(b + u * ldb + v * W);
    for (int r = 0; r < R; ++r) {
      const U value = U{} + a[r * a_row + u * a_unit];
      for (int v = 0; v < V; ++v) acc[r][v] = Op::multiply_add(acc[r][v], value, column[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* const at = c + r * ldc + v * W;
      store(at, accumulate ? load(at) + acc[r][v] : acc[r][v]);
    }
}

template <class Op, int R, int V, int64_t kChain>
__attribute__((noinline)) void block_column(float* c, int64_t ldc, bool accumulate, OperandA a,
                                            int64_t m, const uint32_t* b, int64_t ldb,
                                            int64_t units) {
  for (int64_t u = 0; u < units; u += kChain)
    for (int64_t i = 0; i < m; i += R)
      register_block<Op, R, V>(c + i * ldc, ldc, accumulate || u > 0,
                               a.data + i * a.row + u * a.unit, a.row, a.unit, b + u * ldb, ldb,
                               min(kChain, units - u));
}

// C[m][vectors * W] (+)= A B; m is a multiple of R. Sums of more than kChain units are computed in
// chunks that are added to C, because rounding errors grow with the length of a chain.
template <class Op, int R, int V, int64_t kChain>
TILEWISE_FN void vector_gemm(float* c, int64_t ldc, bool accumulate, OperandA a, int64_t m,
                             OperandB b, int64_t vectors, int64_t units) {
  static_assert(V <= 3);
  while (vectors > 0) {
    // Four vectors are processed as 2 + 2 and not as 3 + 1, because a single vector has too few
    // FMAs to hide its loads.
    const int64_t groups = ceil_div(vectors, V);
    const int64_t now = ceil_div(vectors, groups);
    const auto block = now == 1               ? &block_column<Op, R, 1, kChain>
                       : (now == 2 || V == 2) ? &block_column<Op, R, 2, kChain>
                                              : &block_column<Op, R, V, kChain>;
    block(c, ldc, accumulate, a, m, b.data, b.ld, units);
    c += now * W;
    b.data += now * W;
    vectors -= now;
  }
}

}  // namespace
}  // namespace tilewise::cpu
