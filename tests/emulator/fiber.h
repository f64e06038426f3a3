// Stacks, and the change from one to another.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(TILEWISE_EMULATOR_UCONTEXT)
#define TILEWISE_EMULATOR_UCONTEXT 1
#endif
#if defined(TILEWISE_EMULATOR_UCONTEXT)
#include <ucontext.h>
#endif

namespace tilewise::cuda::emulator {

#if defined(TILEWISE_EMULATOR_UCONTEXT)
// Portable, at two system calls a switch.
struct Context {
  ucontext_t state;
};
#else
// A suspended fiber is its stack pointer: the registers a called function must keep lie there.
struct Context {
  void* stack_pointer = nullptr;
};
#endif

// Suspends into `from` and resumes `to`.
void switch_context(Context& from, Context& to);

// `entry` is called on the stack that ends at `stack_end` when the context is first resumed; it
// must never return.
void make_context(Context& context, char* stack_begin, char* stack_end, void (*entry)());

// `count` stacks that grow down into a page without access: running over the end of one is a
// fault of the process, not the silent corruption of its neighbour.
class Stacks {
 public:
  explicit Stacks(int count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* begin(int i) const;
  char* end(int i) const;

 private:
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tilewise::cuda::emulator
