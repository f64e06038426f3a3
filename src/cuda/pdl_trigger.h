// When a kernel permits the next launch on its stream to start (programmatic dependent launch,
// PDL).
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// A dependent launch (Start::dependent of runtime.h) starts as soon as every CTA of the kernel
// before it has executed griddepcontrol.launch_dependents or exited. The dependent kernel itself
// waits for that kernel's end before it reads results; until then its CTAs occupy the SMs that have
// room.
enum class PdlTrigger : int8_t {
  at_exit,            // no CTA triggers
  after_first_loads,  // a CTA triggers when it has issued the loads of its first keys
  before_epilogue     // a CTA triggers when it has processed its last key
};

}  // namespace tilewise::cuda
