// Whether kernels of the general form may access the rows of a tensor in 16-byte chunks.
#pragma once

#include "cuda/ptx/platform.h"
#include "tilewise/tilewise.h"

namespace tilewise::cuda::mma_sync {

// Whether rows of a tensor start and end at multiples of 16 bytes.
template <class Element>
TILEWISE_DEVICE bool rows_are_aligned(const tilewise_tensor& view, int64_t columns) {
  const int64_t elements = view.stride_batch | view.stride_row | view.stride_head | columns;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
  return ((elements * Element::kBytes | address) & 15) == 0;
}

}  // namespace tilewise::cuda::mma_sync
