#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx512_kernels(int32_t dtype) { return fma_kernels<Isa::avx512>(dtype); }

}  // namespace tilewise::cpu
