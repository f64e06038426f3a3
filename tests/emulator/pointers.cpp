// Kernels also reach shared memory through plain pointers. Compiled with -fsanitize=thread they
// announce every access to memory by a call; the calls are answered here instead of by
// ThreadSanitizer's library, which is not linked: accesses to the shared memory of the block are
// checked, all others go by.
#include <cstdint>
#include <cstring>

#include "emulator/block.h"

namespace tilewise::cuda::emulator {
namespace {

Block* block_of(const void* p) {
  Block* b = running_block();
  return b != nullptr && b->shared().contains(p) ? b : nullptr;
}

void announce_read(const void* p, int64_t bytes) {
  if (Block* b = block_of(p)) b->shared().plain_read(p, bytes, b->moment());
}

void announce_write(const void* p, int64_t bytes) {
  if (Block* b = block_of(p)) b->shared().plain_write(p, bytes, b->moment());
}

}  // namespace
}  // namespace tilewise::cuda::emulator

// The names are the compilers'.
// NOLINTBEGIN(bugprone-reserved-identifier)
using tilewise::cuda::emulator::announce_read;
using tilewise::cuda::emulator::announce_write;

#define TILEWISE_EMULATOR_ACCESS(bytes)                                            \
  void __tsan_read##bytes(void* p) { announce_read(p, bytes); }                    \
  void __tsan_write##bytes(void* p) { announce_write(p, bytes); }                  \
  void __tsan_unaligned_read##bytes(void* p) { announce_read(p, bytes); }          \
  void __tsan_unaligned_write##bytes(void* p) { announce_write(p, bytes); }        \
  void __tsan_volatile_read##bytes(void* p) { announce_read(p, bytes); }           \
  void __tsan_volatile_write##bytes(void* p) { announce_write(p, bytes); }         \
  void __tsan_unaligned_volatile_read##bytes(void* p) { announce_read(p, bytes); } \
  void __tsan_unaligned_volatile_write##bytes(void* p) { announce_write(p, bytes); }

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
  announce_read(p, static_cast<int64_t>(bytes));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  announce_write(p, static_cast<int64_t>(bytes));
}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  announce_read(from, static_cast<int64_t>(bytes));
  announce_write(to, static_cast<int64_t>(bytes));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  announce_read(from, static_cast<int64_t>(bytes));
  announce_write(to, static_cast<int64_t>(bytes));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  announce_write(to, static_cast<int64_t>(bytes));
  return std::memset(to, value, bytes);
}
}
// NOLINTEND(bugprone-reserved-identifier)
