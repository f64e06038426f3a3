// Tile table of the tcgen05 family. Nothing here has been measured: no GPU that runs it was at
// hand.
#pragma once

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

// Code for the family of sm_100 and sm_103. The number of its table is ten times the compute
// capability, plus one.
struct Sm100a {
  static constexpr int kTable = 1001;

  // As many stages as fit beside Q.
  static constexpr Tcgen05ForwardTile forward(int head_dim) {
    return {.keys = 128,
            .stages = head_dim <= 64 ? 8 : 5,
            .softmax_registers = 192,
            .correction_registers = 72,
            .other_registers = 56};
  }
};

}  // namespace tilewise::cuda::arch
