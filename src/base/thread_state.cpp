#include "base/thread_state.h"

#include <pthread.h>

namespace tilewise {
namespace {

#if defined(__x86_64__)
constexpr FloatState kDefault = 0x1f80;  // all six exceptions masked, nothing else set

FloatState current() { return __builtin_ia32_stmxcsr(); }
void set(const FloatState& state) { __builtin_ia32_ldmxcsr(state); }
void set_default() { set(kDefault); }
#else
FloatState current() {
  FloatState state;
  std::fegetenv(&state);
  return state;
}
void set(const FloatState& state) { std::fesetenv(&state); }
void set_default() { std::fesetenv(FE_DFL_ENV); }
#endif

// State of this thread, valid while `depth` DefaultFloatStates are alive.
thread_local FloatState callers;
thread_local int depth = 0;

}  // namespace

DefaultFloatState::DefaultFloatState() noexcept : found_(current()) {
  if (depth++ == 0) callers = found_;
  set_default();
}

DefaultFloatState::~DefaultFloatState() {
  --depth;
  set(found_);
}

CallersFloatState::CallersFloatState() noexcept : found_(current()) {
  if (depth > 0) set(callers);
}

CallersFloatState::~CallersFloatState() { set(found_); }

NoCancellation::NoCancellation() noexcept {
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &found_);
}

NoCancellation::~NoCancellation() { pthread_setcancelstate(found_, nullptr); }

}  // namespace tilewise
