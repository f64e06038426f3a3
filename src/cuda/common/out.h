// Out in device code: its elements have the type of those of q, or are fp32 where the caller asks
// for that (tilewise_attention::out_dtype). The kernels are compiled for the type of q; that of out
// is chosen at run time, where a row is stored or read.
#pragma once

#include "attention/dtypes.h"
#include "attention/problem.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda {

// Whether out is fp32 although T, the type of an element of q, has 16 bits.
template <class T>
TILEWISE_DEVICE bool widens_out(const Problem& p) {
  return sizeof(T) == 2 && dtypes_of(p).out == TILEWISE_FLOAT32;
}

// Calls body(pointer to element `at` of `view`), where the pointer is a T* or a float*. The view is
// out or its tangent, which has the same type.
template <class T, class Body>
TILEWISE_DEVICE auto with_out(const Problem& p, const tilewise_tensor& view, int64_t at,
                              const Body& body) {
  if (widens_out<T>(p)) return body(static_cast<float*>(view.data) + at);
  return body(static_cast<T*>(view.data) + at);
}
template <class T, class Body>
TILEWISE_DEVICE auto with_out(const Problem& p, int64_t at, const Body& body) {
  return with_out<T>(p, p.out, at, body);
}

}  // namespace tilewise::cuda
