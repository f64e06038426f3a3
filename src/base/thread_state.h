// The state of a thread that belongs to the caller: the library sets it for its own work and puts
// it back afterwards.
#pragma once

#include <cfenv>
#include <cstdint>

namespace tilewise {

// What controls floating-point arithmetic: on x86-64 that is MXCSR alone, which takes 20 cycles to
// exchange where the standard functions, which know the x87 unit too, take 200.
#if defined(__x86_64__)
using FloatState = uint32_t;
#else
using FloatState = std::fenv_t;
#endif

// For its lifetime this thread rounds to nearest, keeps subnormal numbers and masks every
// exception: results then depend neither on what the caller has set nor on which thread runs a
// task. The destructor restores what the thread had, exception flags included. Neither is inline,
// so that the compiler cannot move loads, and the arithmetic on them, across.
class DefaultFloatState {
 public:
  DefaultFloatState() noexcept;
  ~DefaultFloatState();
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
  FloatState found_;
};

// Back to the state that the outermost DefaultFloatState of this thread found, while the caller's
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

// pthread_cancel waits until the call is over: cancellation unwinds the stack, which an entry point
// that throws nothing does not allow, and would leave the pool waiting for a task that never ends.
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
