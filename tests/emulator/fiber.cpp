#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace tilewise::cuda::emulator {

#if defined(TILEWISE_EMULATOR_UCONTEXT)

void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

void make_context(Context& context, char* stack_begin, char* stack_end, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack_begin;
  context.state.uc_stack.ss_size = static_cast<size_t>(stack_end - stack_begin);
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#else

// swapcontext saves the signal mask with a system call, 100 times the cost of the switch itself.
// System V ABI: a called function keeps rbx, rbp and r12 to r15. They are pushed, the stacks are
// exchanged (rdi: where the old stack pointer goes, rsi: the new one), and the return address on
// top of the new stack says where it goes on. Rounding modes are the same in all fibers.
extern "C" void tilewise_emulator_switch(void** from, void* to);
asm(R"(
  .pushsection .text
  .type tilewise_emulator_switch, @function
  .hidden tilewise_emulator_switch
  .globl tilewise_emulator_switch
tilewise_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size tilewise_emulator_switch, . - tilewise_emulator_switch
  .popsection
)");

void switch_context(Context& from, Context& to) {
  tilewise_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

void make_context(Context& context, char*, char* stack_end, void (*entry)()) {
  constexpr int kSaved = 6;
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_end) & ~uintptr_t{15});
  *--top = nullptr;  // the return address of `entry`: here debuggers and unwinders stop
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSaved; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 256 * 1024;  // touched pages only cost memory
// Stacks that all start at the same offset of a page would fight for the same lines of the cache.
constexpr size_t kColours = 61;
constexpr size_t kColourBytes = 5 * 64;
}  // namespace

Stacks::Stacks(int count) : bytes_(static_cast<size_t>(count) * kStackBytes) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  for (int i = 0; i < count; ++i) {
    mprotect(memory_ + static_cast<size_t>(i) * kStackBytes, kPage, PROT_NONE);
  }
}

Stacks::~Stacks() { munmap(memory_, bytes_); }

char* Stacks::begin(int i) const { return memory_ + static_cast<size_t>(i) * kStackBytes + kPage; }

char* Stacks::end(int i) const {
  const size_t colour = static_cast<size_t>(i) % kColours * kColourBytes;
  return memory_ + (static_cast<size_t>(i) + 1) * kStackBytes - colour;
}

}  // namespace tilewise::cuda::emulator
