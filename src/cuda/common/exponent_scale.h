// The factor of a score in the exponent of the backward.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda {

// exp2(scale_log2 * s - lse / ln 2) = P. Not zero, so that a masked score has a value that it takes
// to 0, whatever the sign of the scale.
TILEWISE_DEVICE float exponent_scale(float scale) {
  const float x = scale * kLog2e;
  return x < 1e-30f && x > -1e-30f ? 1e-30f : x;
}

}  // namespace tilewise::cuda
