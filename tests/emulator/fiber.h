// Fiber stacks, and the switch between them.
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

// The portable version, at two system calls per switch.
struct Context {
  ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#else

// A suspended fiber is its stack: the address to resume at is on top, and below it is the register
// that the compiler cannot be told to save.
struct Context {
  void* stack_pointer = nullptr;
};

// Suspends into `from` and resumes `to`. swapcontext saves the signal mask with a system call,
// which costs 100 times as much as the switch itself. The function is inline because every return
// from a function that was called on another stack is mispredicted. The first 128 bytes below the
// stack pointer belong to the caller (System V ABI), and rbp may be its frame pointer. The rounding
// mode is the same in all fibers.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  void** from_stack = &from.stack_pointer;
  void* to_stack = to.stack_pointer;
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(from_stack), "+S"(to_stack)
      :
      : "memory", "cc", "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
        "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
#if defined(__AVX512F__)
        ,
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6",
        "k7"
#endif
  );
}

#endif

// When the context is first resumed, it calls `entry` on the stack that ends at `stack_end`;
// `entry` must never return.
void make_context(Context& context, char* stack_begin, char* stack_end, void (*entry)());

// `count` stacks, each of which grows down towards an inaccessible page: an overflow ends the
// process instead of silently corrupting the neighbour.
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
