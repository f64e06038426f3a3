#include "base/thread_state.h"

#include <pthread.h>

namespace tilewise {
namespace {

#if defined(__x86_64__)
constexpr FloatState kDefault = 0x1f80;  // all six exceptions masked, nothing else set

FloatState current() { return __builtin_ia32_stmxcsr(); }
void set(const FloatState& state) { __builtin_ia32_ldmxcsr(state); }
void set_default() { set(kDefault); }
#elif defined(__aarch64__)
// The compilers' names for reading and writing a system register.
#if defined(__clang__)
uint64_t fpcr() { return __builtin_arm_rsr64("fpcr"); }
uint64_t fpsr() { return __builtin_arm_rsr64("fpsr"); }
void set_fpcr(uint64_t value) { __builtin_arm_wsr64("fpcr", value); }
void set_fpsr(uint64_t value) { __builtin_arm_wsr64("fpsr", value); }
#else
uint64_t fpcr() { return __builtin_aarch64_get_fpcr64(); }
uint64_t fpsr() { return __builtin_aarch64_get_fpsr64(); }
void set_fpcr(uint64_t value) { __builtin_aarch64_set_fpcr64(value); }
void set_fpsr(uint64_t value) { __builtin_aarch64_set_fpsr64(value); }
#endif

FloatState current() { return {fpcr(), fpsr()}; }
void set(const FloatState& state) {
  set_fpcr(state.fpcr);
  set_fpsr(state.fpsr);
}
// An FPCR of 0 rounds to nearest, keeps subnormal numbers and NaN payloads, traps nothing, and
// selects the IEEE form of fp16.
void set_default() { set_fpcr(0); }
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
