#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx512_float32() { return kernels_of<FmaEngine<float, Isa::avx512>, Isa::avx512>(); }

}  // namespace tilewise::cpu
