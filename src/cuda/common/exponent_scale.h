// The factor that turns a product q.k into an exponent of 2 in the backward.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/ptx/platform.h"

namespace tilewise::cuda {

// scale_log2 in P = exp2(scale_log2 * s - lse / ln 2). It is never 0, so that an infinite s, with
// the sign that masked scores get, makes P 0 whatever the sign of the scale.
TILEWISE_DEVICE float exponent_scale(float scale) {
  const float x = scale * kLog2e;
  return x < 1e-30f && x > -1e-30f ? 1e-30f : x;
}

}  // namespace tilewise::cuda
