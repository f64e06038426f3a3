#include "cpu/generic/engine_amx.h"
#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* amx_float16() { return kernels_of<AmxSplitEngine<Isa::amx>, Isa::amx>(); }

}  // namespace tilewise::cpu
