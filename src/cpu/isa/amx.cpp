#include "cpu/generic/decode_tiles.h"
#include "cpu/generic/engine_amx.h"
#include "cpu/generic/table.h"

namespace tilewise::cpu {

// fp32 uses the kernels of the avx512 table, as the same code would be compiled here.
const Kernels* amx_kernels(int32_t dtype) {
  switch (dtype) {
    case TILEWISE_BFLOAT16:
      return kernels_of<AmxEngine<Isa::amx>, Isa::amx, TileProducts>();
    case TILEWISE_FLOAT16:
      return kernels_of<AmxSplitEngine<Isa::amx>, Isa::amx>();
    default:
      return avx512_kernels(dtype);
  }
}

}  // namespace tilewise::cpu
