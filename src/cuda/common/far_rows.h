// "Far" rows of the backward: their |lse| is so large that an exponent relative to lse needs more
// precision than one fp32 number has.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/params.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

// A row is far if its |lse| is larger than this. Rounding lse changes a weight by a relative |lse|
// * 1e-7; 16-bit elements tolerate 1e-4, fp32 tolerates 2e-6.
template <class Element>
inline constexpr float kFarLse = Element::kBytes == 2 ? 0x1p10f : 0x1p4f;

template <class Element>
TILEWISE_DEVICE bool is_far_row(float lse) {
  return __builtin_fabsf(lse) > kFarLse<Element> && lse - lse == 0.0f;
}

// Called by a prepare kernel: stores the origin of padded row `at`, which is its lse in two parts
// if the row is far, else 0. Returns whether the row is far.
template <class Element>
TILEWISE_DEVICE bool store_row_origin(const BackwardParams& p, int64_t at, const LogSum& sum) {
  const bool far = is_far_row<Element>(sum.lse);
  p.row_origin[at] = far ? sum.lse : 0.0f;
  p.row_origin_low[at] = far ? sum.low : 0.0f;
  if (far) *p.far_rows = p.launch_id;
  return far;
}

// Whether the call has far rows. The prepare kernel must be complete.
TILEWISE_DEVICE bool has_far_rows(const BackwardParams& p) { return *p.far_rows == p.launch_id; }

TILEWISE_DEVICE LogSum log_sum_at(const Problem& p, int64_t at) {
  return {p.lse[at], p.lse_low != nullptr ? p.lse_low[at] : 0.0f};
}

// Makes the scores of a far row relative to its lse, in units of products: multiplied by
// `scale_log2` they are exponents. They are at most 0, so that no weight exceeds 1, whatever the
// rounding of score and lse.
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
  // A score in natural units, relative to lse if the row is far.
  TILEWISE_DEVICE float subtracted_from(float score) const {
    return is_far() ? relative(score, 1.0f) : score;
  }
  // The same for a product q.k, whose score product * unit is rounded as in plain fp32. The forward
  // may have summed the product in another order. So where lse is the largest score itself, a score
  // that differs from it by no more than such sums do is taken to be the largest one. Beyond 2^30
  // that is certain: fp32 numbers are 128 apart there, more than log l ever is. Where the caller
  // gives no low part, or it is 0, lse is taken to be the largest score beyond 2^24.
  TILEWISE_DEVICE float relative_product(float product, float unit, float inverse) const {
    constexpr float kAgreement = 0x1p-19f;
    const float size = __builtin_fabsf(lse);
    const bool is_largest = low == 0.0f ? size > 0x1p24f : size > 0x1p30f;  // lse is that score
    float score = ptx::mul(product, unit);
    if (is_largest && __builtin_fabsf(score - lse) < size * kAgreement) score = lse;
    return relative(score, inverse);
  }
};

// log2(e) / scale_log2, computed at each use: it is for a rare branch of a loop that has no
// register to keep it in.
TILEWISE_DEVICE float inverse_scale(float scale_log2) {
  return kLog2e * ptx::rcp_approximate(ptx::float_of(ptx::opaque(ptx::bits_of(scale_log2))));
}

}  // namespace tilewise::cuda::common
