// The call stack of the running thread, for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tilewise::cuda::emulator {

// Return addresses, innermost first.
std::vector<uintptr_t> call_stack();

// The functions of the kernel in `stack`, one line each, with source lines where debug information
// exists. Runs addr2line, which comes with the linker; "" where it is missing.
std::string describe(const std::vector<uintptr_t>& stack);

}  // namespace tilewise::cuda::emulator
