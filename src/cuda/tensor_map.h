// A tensor map (TMA descriptor): how a 4-D tensor in global memory is cut into boxes, see
// cuTensorMapEncodeTiled of the CUDA driver API. The host encodes it, and kernels receive it as
// part of their parameters.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

struct alignas(64) TensorMap {
  uint64_t opaque[16] = {};
};

// What a map describes: a tensor [batches, heads, rows, columns] of 16-bit or 8-bit elements with
// contiguous columns; for paged caches a batch entry is a page. A box is 128 bytes of each of
// `box_rows` rows of one head. In shared memory it is stored row by row with the 128-byte swizzle.
// Elements outside of the tensor are read as 0 and not written.
struct TensorMapShape {
  const void* data = nullptr;
  int64_t columns = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t batches = 0;
  int64_t stride_row = 0;  // in elements; a multiple of 16 bytes unless its dimension has one entry
  int64_t stride_head = 0;
  int64_t stride_batch = 0;
  int32_t element_bytes = 2;
  // With 2 bytes: TILEWISE_FLOAT16 or TILEWISE_BFLOAT16, the type in which TMA reductions add.
  int32_t dtype = 0;
  int32_t box_rows = 0;
};

inline constexpr int kTensorMapBoxBytes = 128;      // per row
inline constexpr int64_t kTensorMapAlignment = 16;  // of the address and the strides, in bytes
inline constexpr int32_t kTensorMapMaxBoxRows = 256;

}  // namespace tilewise::cuda
