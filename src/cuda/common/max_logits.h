// The largest logits of a forward in device code (tilewise_attention::max_logits). The prepare
// kernel sets them to -inf, and the CTAs of the main kernel raise them.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"

namespace tilewise::cuda {

// The larger of two logits. NaN is larger than every number.
TILEWISE_DEVICE float larger_logit(float a, float b) { return b > a || b != b ? b : a; }

// Raises an entry of max_logits to `value`. The order of the calls does not change the result,
// since every zero is stored as +0 and every NaN with the same bits. As integers, the bits of the
// numbers from +0 to +inf, and of that NaN above them, are ordered as the numbers are. Those of a
// negative number are less than all of these if they are read as signed, and greater if as
// unsigned; among negative numbers, the larger one has the smaller bits. Most values are not larger
// than the entry, which is then only read.
TILEWISE_DEVICE void raise_max_logit(float* to, float value) {
  const float now = ptx::float_of(ptx::ld_global_b32(to));
  if (now != now || value <= now) return;
  const uint32_t bits = value == value ? ptx::bits_of(value + 0.0f) : 0x7fc00000u;
  if (bits < 0x80000000u)
    ptx::red_max_s32(to, static_cast<int32_t>(bits));
  else
    ptx::red_min_u32(to, bits);
}

}  // namespace tilewise::cuda
