#include "cpu/generic/table.h"

namespace tilewise::cpu {

// AVX512-BF16 adds only bf16 dot products, so fp32 and fp16 use the AVX-512 kernels: the same code
// would be compiled here.
const Kernels* avx512_bf16_kernels(int32_t dtype) {
  return dtype == TILEWISE_BFLOAT16 ? kernels_of<DotEngine<Isa::avx512_bf16>, Isa::avx512_bf16>()
                                    : avx512_kernels(dtype);
}

}  // namespace tilewise::cpu
