#include "cpu/generic/decode_tiles.h"
#include "cpu/generic/engine_amx.h"
#include "cpu/generic/table.h"

namespace tilewise::cpu {

// AMX has no fp32 products, so fp32 uses the AVX-512 kernels: the same code would be compiled here.
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
