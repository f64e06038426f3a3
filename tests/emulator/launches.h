// Launches in the order of a stream, or before their predecessor where they may start early
// (programmatic dependent launch).
#pragma once

#include <functional>

namespace tilewise::cuda::emulator {

// Runs a grid, or holds it back: see TILEWISE_EMULATOR_PDL in README.md. A grid that was held back
// runs when the next grid that depends on it waits for it, or before the next one that does not.
// `dependent`: the grid may start before its predecessor. Throws Fault.
void launch(bool dependent, std::function<void()> grid);

// Runs a grid that is held back. Every call of the library ends with it. Throws Fault.
void finish_launches();
// Forgets a grid that is held back, after an error.
void drop_launches();

}  // namespace tilewise::cuda::emulator
