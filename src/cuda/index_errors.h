// Faults of index arrays, on the host side: those that kernels found and those of the CPU's check.
#pragma once

#include <string>

#include "attention/index_fault.h"

namespace tilewise::cuda {

// One sentence that names the array, the entry, its value and the allowed range.
std::string sentence(const IndexFault& fault);

// The end of that sentence for an entry of cache_seqlens: `rows` new keys must fit after it into a
// cache for `capacity` keys.
std::string cache_length_rule(int64_t rows, int64_t capacity);

// Device address of a GPU's fault record, which kernels write. The library owns it until the
// process ends.
IndexRecord* index_record(int32_t device_index);

}  // namespace tilewise::cuda
