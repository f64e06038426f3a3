#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx512_bf16_bfloat16() {
  return kernels_of<DotEngine<Isa::avx512_bf16>, Isa::avx512_bf16>();
}

}  // namespace tilewise::cpu
