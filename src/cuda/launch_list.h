// A list of the kernels that a process has launched; tools/kernels_run.py compares it with the
// kernels of the build.
#pragma once

#include <string>

namespace tilewise::cuda {

// Whether TILEWISE_LAUNCH_LIST names a folder. Only tests set it; the check costs a launch one
// comparison.
bool lists_launches();

// Appends the kernel's symbol to this process's file in that folder, once per kernel.
void list_launch(const void* function);

// The symbol of a kernel, or "+0x1a2b", its offset inside the library, when only the symbol table
// of the library file has the name (runtime_emulator.cpp).
std::string kernel_symbol(const void* function);

}  // namespace tilewise::cuda
