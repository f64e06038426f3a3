// Matrices of random numbers for the tests of products, and what these tests share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "base/half.h"
#include "cuda/ptx/bulk_copy.h"
#include "emulator/bulk.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {

template <class T>
struct Matrix {
  int rows, columns;
  std::vector<T> values;

  Matrix(int r, int c, int seed) : rows(r), columns(c), values(static_cast<size_t>(r * c)) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal;
    for (T& x : values) x = from_float<T>(normal(random));
  }
  float at(int r, int c) const { return to_float(values[static_cast<size_t>(r * columns + c)]); }
  uint32_t bits(int r, int c) const { return values[static_cast<size_t>(r * columns + c)].bits; }
  // With boxes of `box_rows` rows.
  TensorMap map(int box_rows) const {
    TensorMap map;
    encode_tensor_map(map, {.data = values.data(),
                            .columns = columns,
                            .rows = rows,
                            .heads = 1,
                            .batches = 1,
                            .stride_row = columns,
                            .stride_head = 0,
                            .stride_batch = 0,
                            .element_bytes = sizeof(T),
                            .dtype = 0,
                            .box_rows = box_rows});
    return map;
  }
};

// Loads the panels of a tile whose first column, or row if `trans`, is `k`.
template <class Tile>
void load_panels(const Tile& to, const TensorMap& map, bool trans, int k,
                 ptx::SharedAddress barrier) {
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::cp_async_bulk_tensor_load(to.base + static_cast<uint32_t>(panel * Tile::kPanelBytes), map,
                                   trans ? panel * 64 : k, trans ? k : 0, 0, 0, barrier,
                                   ptx::CachePolicy::evict_last);
  }
}

// Calls multiply(d), which computes d [m, n] = a b from operands that may be transposed, with every
// time at which copies land and every order of threads, and compares d with plain loops.
template <class T, class Multiply>
void check_products(const Matrix<T>& a, bool trans_a, const Matrix<T>& b, bool trans_b,
                    const Multiply& multiply) {
  const int m = trans_a ? a.columns : a.rows;
  const int n = trans_b ? b.columns : b.rows;
  const int depth = trans_a ? a.rows : a.columns;
  for (const char* copies : {"late", "early"}) {
    for (const char* order : {"forward", "reverse", "shuffled"}) {
      const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
      const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
      std::vector<float> d(static_cast<size_t>(m * n), std::nanf(""));
      multiply(d);
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          double sum = 0;
          for (int k = 0; k < depth; ++k) {
            sum += static_cast<double>(trans_a ? a.at(k, i) : a.at(i, k)) *
                   (trans_b ? b.at(k, j) : b.at(j, k));
          }
          ASSERT_NEAR(d[static_cast<size_t>(i * n + j)], sum, 1e-4) << i << " " << j;
        }
      }
    }
  }
}

}  // namespace tilewise::cuda::emulator
