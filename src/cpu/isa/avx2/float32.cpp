#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx2_float32() { return kernels_of<FmaEngine<float, Isa::avx2>, Isa::avx2>(); }

}  // namespace tilewise::cpu
