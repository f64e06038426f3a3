#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* neon_bfloat16() { return kernels_of<FmaEngine<BFloat16, Isa::neon>, Isa::neon>(); }

}  // namespace tilewise::cpu
