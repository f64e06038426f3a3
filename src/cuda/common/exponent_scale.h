// The factor that turns a product q.k into an exponent of 2 in the backward.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda {

// scale_log2 in P = exp2(scale_log2 * s - lse / ln 2). It is never 0: a masked s is the infinity
// that scale_log2 turns into -inf, so that P is 0, and 0 times infinity would be NaN.
TILEWISE_DEVICE float exponent_scale(float scale) {
  const float x = scale * kLog2e;
  return x < 1e-30f && x > -1e-30f ? 1e-30f : x;
}

}  // namespace tilewise::cuda
