#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* portable_kernels(int32_t dtype) { return fma_kernels<Isa::portable>(dtype); }

}  // namespace tilewise::cpu
