#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* portable_float16() {
  return kernels_of<FmaEngine<Half, Isa::portable>, Isa::portable>();
}

}  // namespace tilewise::cpu
