#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx2_float16() { return kernels_of<FmaEngine<Half, Isa::avx2>, Isa::avx2>(); }

}  // namespace tilewise::cpu
