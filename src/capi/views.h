// Checks of sizes, strides and pointers, shared by all tensors of all entry points.
#pragma once

#include <array>
#include <cstdint>

#include "attention/dtypes.h"

namespace tilewise::capi {

// Maximum number of rows of q, and of keys, over all sequences and heads: far beyond any memory,
// and small enough that products with head dimensions and element sizes fit into 64 bits.
inline constexpr int64_t kMaxRows = int64_t{1} << 42;

// Maximum number of sequences and of heads: kernels count them in 32 bits.
inline constexpr int64_t kMaxCount = INT32_MAX;

enum class Access { read, write };

// One dimension of a view: its size, and its stride in elements. The view's name followed by
// stride_name is the name of the struct field: ".stride_row" for a tilewise_tensor, "_stride_row"
// for a struct with a pointer.
struct Dimension {
  const char* stride_name;
  int64_t size;
  int64_t stride;
};

struct View {
  const char* name;
  const void* data;
  std::array<Dimension, 3> dimensions;  // size 1 for dimensions that do not exist
  int64_t columns;                      // contiguous
  int64_t element_bytes;
  Access access;

  bool empty() const;
};

// Checks that the view's offsets fit into 64 bits and, if it is written, that no two elements
// overlap.
void check_layout(const View& view);

// Checks the pointer: given (unless the view is empty) and aligned to its element.
void check_data(const View& view);

// Throws a Refusal unless lowest <= value <= highest.
void check_range(const char* name, int64_t value, int64_t lowest, int64_t highest);
[[noreturn]] void refuse_range(const char* name, int64_t value, int64_t lowest, int64_t highest);
void check_aligned(const char* name, const void* pointer, int64_t bytes);

// Checks a * b * c <= kMaxRows, for factors >= 0. A 0 counts as 1, because planners multiply any
// two of them.
void check_rows(const char* names, int64_t a, int64_t b, int64_t c);

const char* dtype_name(int32_t dtype);
bool is_dtype(int32_t dtype);

}  // namespace tilewise::capi
