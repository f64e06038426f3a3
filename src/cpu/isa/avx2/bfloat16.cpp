#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx2_bfloat16() { return kernels_of<FmaEngine<BFloat16, Isa::avx2>, Isa::avx2>(); }

}  // namespace tilewise::cpu
