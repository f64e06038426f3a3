#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* neon_bf16_bfloat16() {
  return kernels_of<DotEngine<Isa::neon_bf16>, Isa::neon_bf16>();
}

}  // namespace tilewise::cpu
