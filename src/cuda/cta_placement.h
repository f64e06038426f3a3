// Spreads the chunks of a grid over the GPCs when the grid has more CTAs than chunks.
#pragma once

#include <cstdint>

#include "base/divisor.h"

namespace tilewise::cuda {

// Maps CTAs to chunks. The first `first` CTAs have one chunk each. With uniform lengths only
// `chunks` of the next `ctas` CTAs have one, and all of these run in one wave. The hardware fills
// one GPC after the other, and a GPC in which every SM reads gets less bandwidth per SM. (H200, 96
// chunks for 132 CTAs: 68 us in the GPC with few of them, 111 us in the others; 93 us in all when
// spread.)
struct CtaPlacement {
  int32_t chunks = 0;  // 0: CTA i has chunk i
  Divisor ctas = 1;
  int32_t first = 0;

  TILEWISE_FN constexpr bool any() const { return chunks != 0; }
  // A bijection: the CTAs without a chunk get the numbers after the last one.
  TILEWISE_FN constexpr int32_t chunk_of(int32_t block) const {
    const int32_t index = block - first;
    if (!any() || index < 0 || index >= ctas) return block;
    const int32_t before = ctas.quotient(index * chunks);
    const bool has_chunk = ctas.quotient((index + 1) * chunks) > before;
    return first + (has_chunk ? before : chunks + index - before);
  }
};

}  // namespace tilewise::cuda
