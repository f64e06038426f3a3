// Where the blocks of a grid that have nothing to do are in it.
#pragma once

#include <cstdint>

#include "base/divisor.h"

namespace tilewise::cuda {

// Which works the blocks of a grid have, of which not all have one: where lengths are alike the
// first `works` of `places`, behind `first` blocks that all have one, and all of those run at once.
// The hardware deals a grid out to one GPC after the other, and one of which all multiprocessors
// read is slower for it (H200, 96 of 132 blocks with work, by their times: 68 us in the GPC that
// was dealt few of them, 111 in the others, 93 in all when they are spread).
struct Spread {
  int32_t works = 0;   // 0: as they come
  Divisor places = 1;  // blocks
  int32_t first = 0;   // blocks before them

  TILEWISE_FN constexpr bool any() const { return works != 0; }
  TILEWISE_FN constexpr int32_t work_of(int32_t block) const {
    const int32_t place = block - first;
    if (!any() || place < 0 || place >= places) return block;
    const int32_t before = places.quotient(place * works);
    const bool is_one = places.quotient((place + 1) * works) > before;
    return first + (is_one ? before : works + place - before);
  }
};

}  // namespace tilewise::cuda
