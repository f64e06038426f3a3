// Matrices of random numbers for the tests of products.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "base/half.h"
#include "emulator/bulk.h"

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
                            .dtype = 0,
                            .box_rows = box_rows});
    return map;
  }
};

}  // namespace tilewise::cuda::emulator
