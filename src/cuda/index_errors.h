// Faults that kernels found in index arrays, on the host side.
#pragma once

#include <string>

#include "attention/index_fault.h"

namespace tilewise::cuda {

// One sentence that names the array, the entry, its value and the allowed range.
std::string sentence(const IndexFault& fault);

// Device address of a GPU's fault record, which kernels write. The library owns it until the
// process ends.
IndexRecord* index_record(int32_t device_index);

}  // namespace tilewise::cuda
