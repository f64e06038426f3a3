#include "cpu/generic/decode_tiles.h"
#include "cpu/generic/engine_amx.h"
#include "cpu/generic/table.h"

namespace tilewise::cpu {

const Kernels* amx_bfloat16() { return kernels_of<AmxEngine<Isa::amx>, Isa::amx, TileProducts>(); }

}  // namespace tilewise::cpu
