// What the matrix units multiply. F32 is exact to fp32 accuracy by three TF32 products of split
// operands (Ootomo & Yokota, arXiv 2203.03341); Tf32 is one product, for callers who ask for it.
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
// Whether 16 bits have the range of fp32: a weight may then exceed 1 by far.
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
// Of keys and values alone: a kernel multiplies them as F16.
struct E4M3 {
  using Storage = Float8;
  static constexpr int32_t kDtype = TILEWISE_FLOAT8_E4M3;
  static constexpr int kBytes = 1;
};

// 16 bits in memory, of which a kernel learns when it runs whether they are F16 or BF16.
struct EitherHalf {
  uint16_t bits;
};

}  // namespace tilewise::cuda
