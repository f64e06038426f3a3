// Reductions and exchanges over a quad, the four lanes that share a row of sums.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::tile {

TILEWISE_DEVICE float quad_max(float x) {
  x = ptx::fmax(x, ptx::shuffle_xor(x, 1));
  return ptx::fmax(x, ptx::shuffle_xor(x, 2));
}

TILEWISE_DEVICE uint32_t quad_max(uint32_t x) {
  x = max(x, ptx::shuffle_xor(x, 1));
  return max(x, ptx::shuffle_xor(x, 2));
}

TILEWISE_DEVICE float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}

// Sets each word[i] to the former word[i ^ t].
TILEWISE_DEVICE void permute_words(uint32_t (&word)[4], int t) {
  const uint32_t a[4] = {t & 1 ? word[1] : word[0], t & 1 ? word[0] : word[1],
                         t & 1 ? word[3] : word[2], t & 1 ? word[2] : word[3]};
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = t & 2 ? a[i ^ 2] : a[i];
}

// Lane t of a quad gives word j to lane j and receives into word[i] that of lane i.
TILEWISE_DEVICE void quad_transpose(uint32_t (&word)[4], int t) {
  permute_words(word, t);
#pragma unroll
  for (int d = 1; d < 4; ++d) word[d] = ptx::shuffle_xor(word[d], d);
  permute_words(word, t);
}

}  // namespace tilewise::cuda::tile
