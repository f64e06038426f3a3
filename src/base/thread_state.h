// State of a thread that belongs to the caller. The library sets it for its own work and restores
// it afterwards.
#pragma once

#include <cfenv>
#include <cstdint>

namespace tilewise {

// The controls and the exception flags of floating-point arithmetic. On x86-64 that is MXCSR alone,
// which takes 20 cycles to exchange; the standard functions, which also handle the x87 unit, take
// 200. On Arm the standard functions do not reset all controls: glibc treats those that are newer
// than it as reserved.
#if defined(__x86_64__)
using FloatState = uint32_t;
#elif defined(__aarch64__)
struct FloatState {
  uint64_t fpcr;  // controls
  uint64_t fpsr;  // flags
};
#else
using FloatState = std::fenv_t;
#endif

// While it exists, this thread rounds to nearest, keeps subnormal numbers and masks every
// exception, so results depend neither on the caller's settings nor on the thread that runs a task.
// The destructor restores the previous state, exception flags included. The constructor and
// destructor are not inline, so that the compiler cannot move loads, and the arithmetic on them,
// across.
class DefaultFloatState {
 public:
  DefaultFloatState() noexcept;
  ~DefaultFloatState();
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
  FloatState found_;
};

// Restores the state that the outermost DefaultFloatState of this thread found, while the caller's
// own code runs (the tilewise_parallel hook): threads that it starts inherit that state.
class CallersFloatState {
 public:
  CallersFloatState() noexcept;
  ~CallersFloatState();
  CallersFloatState(const CallersFloatState&) = delete;
  CallersFloatState& operator=(const CallersFloatState&) = delete;

 private:
  FloatState found_;
};

// Delays pthread_cancel until the call is over. Cancellation unwinds the stack, which an entry
// point that is noexcept does not allow, and it would leave the pool waiting for a task that never
// ends.
class NoCancellation {
 public:
  NoCancellation() noexcept;
  ~NoCancellation();
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int found_;
};

}  // namespace tilewise
