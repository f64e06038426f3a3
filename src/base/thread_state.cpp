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

// The state that the outermost of this thread's `depth` nested DefaultFloatStates has found.
thread_local FloatState callers_state;
thread_local int depth = 0;

}  // namespace

DefaultFloatState::DefaultFloatState() noexcept : found_(current()) {
  if (depth++ == 0) callers_state = found_;
  set_default();
}

DefaultFloatState::~DefaultFloatState() {
  --depth;
  set(found_);
}

CallersFloatState::CallersFloatState() noexcept : found_(current()) {
  if (depth > 0) set(callers_state);
}

CallersFloatState::~CallersFloatState() { set(found_); }

NoCancellation::NoCancellation() noexcept {
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &found_);
}

NoCancellation::~NoCancellation() { pthread_setcancelstate(found_, nullptr); }

}  // namespace tilewise
