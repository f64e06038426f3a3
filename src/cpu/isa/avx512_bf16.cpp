#include "cpu/generic/table.h"

namespace tilewise::cpu {

// fp32 and fp16 use the kernels of the avx512 table, as the same code would be compiled here.
const Kernels* avx512_bf16_kernels(int32_t dtype) {
  return dtype == TILEWISE_BFLOAT16 ? kernels_of<DotEngine<Isa::avx512_bf16>, Isa::avx512_bf16>()
                                    : avx512_kernels(dtype);
}

}  // namespace tilewise::cpu
