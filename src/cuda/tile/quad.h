// Reductions over the four lanes that share a row of sums.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::tile {

TILEWISE_DEVICE float quad_max(float x) {
  x = ptx::fmax(x, ptx::shuffle_xor(x, 1));
  return ptx::fmax(x, ptx::shuffle_xor(x, 2));
}

TILEWISE_DEVICE float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}

}  // namespace tilewise::cuda::tile
