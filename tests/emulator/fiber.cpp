#include "emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace tilewise::cuda::emulator {

void make_context(Context& context, char* stack_begin, char* stack_end, void (*entry)()) {
#if defined(TILEWISE_EMULATOR_UCONTEXT)
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack_begin;
  context.state.uc_stack.ss_size = static_cast<size_t>(stack_end - stack_begin);
  context.state.uc_link = nullptr;
  ::makecontext(&context.state, entry, 0);
#else
  (void)stack_begin;
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_end) & ~uintptr_t{15});
  *--top = nullptr;  // the return address of `entry`, where debuggers and unwinders stop
  *--top = reinterpret_cast<void*>(entry);
  context.stack_pointer = top;
#endif
}

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 256 * 1024;  // only touched pages cost memory
// Stacks that all start at the same offset in a page would compete for the same cache lines.
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
