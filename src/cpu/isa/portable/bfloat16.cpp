#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* portable_bfloat16() {
  return kernels_of<FmaEngine<BFloat16, Isa::portable>, Isa::portable>();
}

}  // namespace tilewise::cpu
