// Kernels also access shared memory through plain pointers. With -fsanitize=thread the compiler
// precedes every memory access by a call. The functions here receive these calls in place of
// ThreadSanitizer's library, which is not linked: they check accesses to the block's shared memory
// and ignore all others.
#include <cstdint>
#include <cstring>

#include "emulator/block.h"

namespace tilewise::cuda::emulator {
namespace {

Block* block_of(const void* p) {
  Block* b = running_block();
  return b != nullptr && b->shared().contains(p) ? b : nullptr;
}

void note(Block& b, const void* p, int64_t bytes, const void* place) {
  constexpr int64_t kLargest = 16;  // no single instruction accesses more
  if (bytes > kLargest) return;
  ++b.counts().shared_accesses;
  b.note_access(place, static_cast<uint32_t>(static_cast<const char*>(p) - b.shared().data()),
                static_cast<int>(bytes));
}

void check_read(const void* p, int64_t bytes, const void* place) {
  Block* b = block_of(p);
  if (b == nullptr) return;
  b->shared().plain_read(p, bytes, b->moment());
  note(*b, p, bytes, place);
}

void check_write(const void* p, int64_t bytes, const void* place) {
  Block* b = block_of(p);
  if (b == nullptr) return;
  b->shared().plain_write(p, bytes, b->moment());
  note(*b, p, bytes, place);
}

}  // namespace
}  // namespace tilewise::cuda::emulator

// The compilers prescribe these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
using tilewise::cuda::emulator::check_read;
using tilewise::cuda::emulator::check_write;

#define TILEWISE_EMULATOR_ACCESS(bytes)                                                            \
  void __tsan_read##bytes(void* p) { check_read(p, bytes, __builtin_return_address(0)); }          \
  void __tsan_write##bytes(void* p) { check_write(p, bytes, __builtin_return_address(0)); }        \
  void __tsan_unaligned_read##bytes(void* p) {                                                     \
    check_read(p, bytes, __builtin_return_address(0));                                             \
  }                                                                                                \
  void __tsan_unaligned_write##bytes(void* p) {                                                    \
    check_write(p, bytes, __builtin_return_address(0));                                            \
  }                                                                                                \
  void __tsan_volatile_read##bytes(void* p) { check_read(p, bytes, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* p) {                                                     \
    check_write(p, bytes, __builtin_return_address(0));                                            \
  }                                                                                                \
  void __tsan_unaligned_volatile_read##bytes(void* p) {                                            \
    check_read(p, bytes, __builtin_return_address(0));                                             \
  }                                                                                                \
  void __tsan_unaligned_volatile_write##bytes(void* p) {                                           \
    check_write(p, bytes, __builtin_return_address(0));                                            \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
TILEWISE_EMULATOR_ACCESS(1)
TILEWISE_EMULATOR_ACCESS(2)
TILEWISE_EMULATOR_ACCESS(4)
TILEWISE_EMULATOR_ACCESS(8)
TILEWISE_EMULATOR_ACCESS(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  check_read(p, static_cast<int64_t>(bytes), __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  check_write(p, static_cast<int64_t>(bytes), __builtin_return_address(0));
}
// Atomics on counters in global memory.
int __tsan_atomic32_fetch_add(volatile int* p, int x, int order) {
  (void)order;
  return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  check_read(from, static_cast<int64_t>(bytes), __builtin_return_address(0));
  check_write(to, static_cast<int64_t>(bytes), __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  check_read(from, static_cast<int64_t>(bytes), __builtin_return_address(0));
  check_write(to, static_cast<int64_t>(bytes), __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  check_write(to, static_cast<int64_t>(bytes), __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
}
// NOLINTEND(bugprone-reserved-identifier)
