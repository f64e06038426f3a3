// Rows of the backward whose lse is too large for an exponent in one fp32 number.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

// What a loop is ready for: instances of their own leave the usual loop as it is.
enum class Reach { near, far };

// Rounding lse costs a weight |lse| * 1e-7 of itself: 16 bits hide 1e-4, fp32 hides 2e-6.
template <class Element>
inline constexpr float kFarLse = Element::kBytes == 2 ? 0x1p10f : 0x1p4f;

template <class Element>
TILEWISE_DEVICE bool is_far_row(float lse) {
  return __builtin_fabsf(lse) > kFarLse<Element> && lse - lse == 0.0f;
}

// Writes down what a prepare kernel knows of row `at` of all padded rows; whether it is far.
template <class Element>
TILEWISE_DEVICE bool store_row_origin(const BackwardParams& p, int64_t at, const LogSum& sum) {
  const bool far = is_far_row<Element>(sum.lse);
  p.row_origin[at] = far ? sum.lse : 0.0f;
  p.row_origin_low[at] = far ? sum.low : 0.0f;
  if (far) *p.far_rows = p.launch_id;
  return far;
}

TILEWISE_DEVICE LogSum log_sum_at(const Problem& p, int64_t place) {
  return {p.lse[place], p.lse_low != nullptr ? p.lse_low[place] : 0.0f};
}

// Scores of one row become relative to its lse, in the units of the products: multiplied by
// `scale_log2` they are exponents. Weights are not above 1, whatever the rounding of either.
struct RowOrigin {
  float lse;
  float low;

  TILEWISE_DEVICE static RowOrigin of(const BackwardParams& p, int64_t at) {
    return {ptx::float_of(ptx::ld_global_b32(p.row_origin + at)),
            ptx::float_of(ptx::ld_global_b32(p.row_origin_low + at))};
  }
  TILEWISE_DEVICE bool is_far() const { return lse != 0.0f; }
  // `inverse`: log2(e) / scale_log2.
  TILEWISE_DEVICE float relative(float score, float inverse) const {
    return min((score - lse) - low, 0.0f) * inverse;
  }
  // Of a product, whose unit is `unit`, and which is rounded as plain fp32 has it. The forward may
  // have summed it in another order: a score as near to the largest one as such sums agree is that.
  TILEWISE_DEVICE float relative_product(float product, float unit, float inverse) const {
    constexpr float kAgreement = 0x1p-19f;
    const float size = __builtin_fabsf(lse);
    const bool is_largest = low == 0.0f ? size > 0x1p24f : size > 0x1p30f;  // what lse is
    float score = ptx::mul(product, unit);
    if (is_largest && __builtin_fabsf(score - lse) < size * kAgreement) score = lse;
    return relative(score, inverse);
  }
};

// log2(e) / scale_log2, computed where it is asked for: in a rare branch of a loop that has no
// register for it.
TILEWISE_DEVICE float inverse_scale(float scale_log2) {
  return kLog2e * ptx::rcp_approximate(ptx::float_of(ptx::opaque(ptx::bits_of(scale_log2))));
}

}  // namespace tilewise::cuda::common
