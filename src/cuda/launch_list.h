// Which kernels a process has launched: what tools/kernels_run.py holds against the kernels that a
// build contains.
#pragma once

#include <string>

namespace tilewise::cuda {

// Whether TILEWISE_LAUNCH_LIST names a folder. Only tests set it: a launch pays for one comparison.
bool lists_launches();

// Writes the name of the kernel to a file of this process in that folder, once per kernel.
void list_launch(const void* function);

// The symbol of a kernel, or "+0x1a2b", its address inside the library, where only the symbol table
// of the file knows it (runtime_*.cpp).
std::string kernel_symbol(const void* function);

}  // namespace tilewise::cuda
