// What kernels have found wrong with index arrays, as the host sees it.
#pragma once

#include <string>

#include "attention/index_fault.h"

namespace tilewise::cuda {

// One sentence: the array, the entry, its value and what is allowed.
std::string sentence(const IndexFault& fault);

// The record of a GPU, for the kernels of a launch: memory of the library, which is there as long
// as the process is.
IndexRecord* index_record(int32_t device_index);

}  // namespace tilewise::cuda
