// Questions about the tensors of a request: can kernels read them by vector loads, and by TMA?
// Every answer is a function of sizes, strides and addresses.
#pragma once

#include "attention/request.h"

namespace tilewise::cuda {

// Whether every row that is read or written, also inside pages, starts at a multiple of 16 bytes.
bool rows_are_aligned(const Request& request);

// Whether TMA can read q or dout (`view`), contiguous k and v, or pages of k and v: strides are 0
// (an expanded dimension) or positive and within TMA's 2^40 bytes, and row numbers fit in 32 bits.
// A TMA box lies inside one page and starts at a multiple of its number of rows, so pages must not
// have left padding, which would shift that start.
bool rows_are_mappable(const Problem& p, const tilewise_tensor& view);
bool keys_are_mappable(const Problem& p);
bool pages_are_mappable(const Problem& p);

// Whether each TMA box is a whole page or a tile of `keys` keys.
bool pages_fit_boxes(const Problem& p, int64_t keys);

// Whether Form::paged can count the rows of a sequence and the 16-byte chunks of a cache in 32
// bits.
bool pages_fit_32_bits(const Problem& p);

}  // namespace tilewise::cuda
