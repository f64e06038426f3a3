// The row statistics of the backwards (BackwardParams::row_lse, row_delta): what their prepare
// kernels share.
#pragma once

#include "base/half.h"
#include "cuda/ptx/convert.h"

namespace tilewise::cuda::common {

// The row_lse of a row that is not in use or sees no key. Its P is exp2(s - 1e30) = 0 for every
// score s; an infinite row_lse could be subtracted from another infinity.
inline constexpr float kUnusedRow = -1e30f;

// Element i of the 16 bytes in `r`.
template <class Element>
TILEWISE_DEVICE float element_of(const uint32_t (&r)[4], int i) {
  if constexpr (Element::kBytes == 4)
    return ptx::float_of(r[i]);
  else
    return to_float(typename Element::Storage{
        static_cast<uint16_t>(i % 2 == 0 ? r[i / 2] & 0xffffu : r[i / 2] >> 16)});
}

// `sum` plus the dot product of the elements in 16 bytes of each of two rows.
template <class Element>
TILEWISE_DEVICE float add_products(float sum, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#pragma unroll
  for (int e = 0; e < 16 / Element::kBytes; ++e)
    sum = ptx::fma(element_of<Element>(a, e), element_of<Element>(b, e), sum);
  return sum;
}

// The same for a row `a` in fp32, from `column` on; columns from `columns` on are left out.
template <class Element>
TILEWISE_DEVICE float add_wide_products(float sum, const float* a, int column, int columns,
                                        const uint32_t (&b)[4]) {
#pragma unroll
  for (int e = 0; e < 16 / Element::kBytes; ++e) {
    if (column + e < columns) sum = ptx::fma(a[column + e], element_of<Element>(b, e), sum);
  }
  return sum;
}

}  // namespace tilewise::cuda::common
