#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx512_float16() { return kernels_of<FmaEngine<Half, Isa::avx512>, Isa::avx512>(); }

}  // namespace tilewise::cpu
