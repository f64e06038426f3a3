#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* neon_float32() { return kernels_of<FmaEngine<float, Isa::neon>, Isa::neon>(); }

}  // namespace tilewise::cpu
