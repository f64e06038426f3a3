#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx512_bfloat16() {
  return kernels_of<FmaEngine<BFloat16, Isa::avx512>, Isa::avx512>();
}

}  // namespace tilewise::cpu
