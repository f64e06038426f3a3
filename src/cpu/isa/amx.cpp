#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* amx_kernels(int32_t dtype) { return avx512_bf16_kernels(dtype); }

}  // namespace tilewise::cpu
