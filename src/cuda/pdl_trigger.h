// When a kernel lets the next launch on its stream begin (programmatic dependent launch).
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// A dependent launch (Start::dependent of runtime.h) starts as soon as all CTAs of the kernel
// before it have executed griddepcontrol.launch_dependents or exited, and itself waits for the end
// of that kernel before it reads results. Its CTAs take whatever room is free at that time.
enum class PdlTrigger : int8_t {
  at_exit,            // no CTA triggers
  after_first_loads,  // when a CTA has issued the loads of its first keys
  before_epilogue     // when a CTA has met its last key
};

}  // namespace tilewise::cuda
