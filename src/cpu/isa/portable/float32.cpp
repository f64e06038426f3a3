#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* portable_float32() {
  return kernels_of<FmaEngine<float, Isa::portable>, Isa::portable>();
}

}  // namespace tilewise::cpu
