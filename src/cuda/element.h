// Element types of the tensor-core kernels. F32 reaches fp32 accuracy by three TF32 products of
// split operands (Ootomo & Yokota, arXiv 2203.03341); Tf32 is one product, which callers have to
// request.
#pragma once

#include "base/float8.h"
#include "base/platform.h"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {

struct F16 {
  using Storage = Half;
  static constexpr int32_t kDtype = TILEWISE_FLOAT16;
  static constexpr int kBytes = 2;
};
struct BF16 {
  using Storage = BFloat16;
  static constexpr int32_t kDtype = TILEWISE_BFLOAT16;
  static constexpr int kBytes = 2;
};
// Whether the 16-bit type has the range of fp32, so that softmax weights may be far above 1.
template <class Element>
inline constexpr bool kHasWideRange = Element::kDtype == TILEWISE_BFLOAT16;
struct F32 {
  using Storage = float;
  static constexpr int32_t kDtype = TILEWISE_FLOAT32;
  static constexpr int kBytes = 4;
};
struct Tf32 {
  using Storage = float;
  static constexpr int32_t kDtype = TILEWISE_FLOAT32;
  static constexpr int kBytes = 4;
};
// For keys and values only. Kernels convert them to F16 before the product.
struct E4M3 {
  using Storage = Float8;
  static constexpr int32_t kDtype = TILEWISE_FLOAT8_E4M3;
  static constexpr int kBytes = 1;
};

// 16 bits in memory that are F16 or BF16; the kernel learns which at run time.
struct EitherHalf {
  uint16_t bits;
};

}  // namespace tilewise::cuda
