// Where in the program the running thread is, for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tilewise::cuda::emulator {

// Return addresses, innermost first.
std::vector<uintptr_t> call_stack();

// The functions of the kernel among them, a line each, with source lines where there is debug
// information. Asks addr2line, which comes with the linker; "" where there is none.
std::string describe(const std::vector<uintptr_t>& stack);

}  // namespace tilewise::cuda::emulator
