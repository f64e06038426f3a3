#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* neon_float16() { return kernels_of<FmaEngine<Half, Isa::neon>, Isa::neon>(); }

}  // namespace tilewise::cpu
