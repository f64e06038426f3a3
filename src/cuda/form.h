// The forms of a kernel: what its loop has to be ready for.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// `plain` has what costs nothing in the inner loop (scale, band, lengths, groups, sinks);
// `general` adds softcap, ALiBi, bias, dropout, pages and any alignment as uniform switches.
// `paged` and `boxes`, of mma_sync's forward alone, are `plain` over a block table, and with keys
// and values that come as boxes of TMA.
enum class Form : int32_t { plain, general, paged, boxes };

}  // namespace tilewise::cuda
