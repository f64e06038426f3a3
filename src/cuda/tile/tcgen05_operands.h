// Descriptors of tcgen05.mma: of operands in shared memory, which are the tiles of swizzled.h, and
// of the product. PTX ISA 9.7.16.4.1 and 9.7.16.4.2.
#pragma once

#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::tile {

// The descriptor of the operand that `operand`, a descriptor of swizzled.h, names. Address and byte
// offsets have the same place in both; here bits 46 to 48 are 1, and the 128-byte swizzle is 2 in
// bits 61 to 63.
TILEWISE_FN constexpr uint64_t tcgen05_operand(uint64_t operand) {
  return (operand & ~Operand::kSwizzle128) | uint64_t{1} << 46 | uint64_t{2} << 61;
}

struct ProductShape {
  int m, n;
  bool bf16;     // both operands, else fp16
  bool trans_a;  // the operand is stored with m contiguous instead of k
  bool trans_b;  // with n contiguous
  bool negate_a = false;
};

// The instruction descriptor of kind::f16 with fp32 sums.
TILEWISE_FN constexpr uint32_t tcgen05_kind(const ProductShape& shape) {
  constexpr uint32_t kFloatSums = 1u << 4;
  const uint32_t type = shape.bf16 ? 1 : 0;
  return kFloatSums | type << 7 | type << 10 | (shape.negate_a ? 1u : 0u) << 13 |
         (shape.trans_a ? 1u : 0u) << 15 | (shape.trans_b ? 1u : 0u) << 16 |
         static_cast<uint32_t>(shape.n / 8) << 17 | static_cast<uint32_t>(shape.m / 16) << 24;
}

}  // namespace tilewise::cuda::tile
