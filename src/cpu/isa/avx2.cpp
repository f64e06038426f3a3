#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* avx2_kernels(int32_t dtype) { return fma_kernels<Isa::avx2>(dtype); }

}  // namespace tilewise::cpu
