// Races and bounds errors of accesses through plain pointers. This file is compiled with
// -fsanitize=thread, so that the emulator sees these accesses (pointers.cpp).
#include "cuda/ptx/block.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/shared.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

uint32_t* words() { return reinterpret_cast<uint32_t*>(ptx::shared_memory()); }

TEST(Pointers, RaceWithoutBarrier) {
  const auto exchange = [](bool with_barrier) {
    const int thread = ptx::thread_index();
    words()[thread] = 1;
    if (with_barrier) ptx::sync_block();
    if (thread >= 32) words()[thread] += words()[thread - 32];
  };
  EXPECT_EQ(fault_of(1, 64, 256, [&] { exchange(true); }), "");
  const std::string message = fault_of(1, 64, 256, [&] { exchange(false); });
  expect_contains(message, "race: read through a pointer of byte 0");
  expect_contains(message, "which thread 0 wrote with no sync_block between");
}

TEST(Pointers, WriteOverBytesBeingRead) {
  const auto ring = [](bool with_barrier) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 2; ++i) {
      if (ptx::warp_index() == 0) words()[ptx::lane_index()] = i;
      ptx::sync_block();
      sum += words()[31 - ptx::lane_index()];
      if (with_barrier) ptx::sync_block();
    }
    ASSERT_EQ(sum, 1u);
  };
  EXPECT_EQ(fault_of(1, 64, 128, [&] { ring(true); }), "");
  expect_contains(fault_of(1, 64, 128, [&] { ring(false); }),
                  "race: write through a pointer of byte");
}

TEST(Pointers, ReadDuringACopy) {
  alignas(16) static const uint32_t source[4] = {1, 2, 3, 4};
  expect_contains(fault_of(1, 32, 128,
                           [] {
                             if (ptx::thread_index() != 0) return;
                             ptx::cp_async_16(ptx::shared_address(words()), source);
                             ptx::cp_async_commit_group();
                             words()[8] = words()[2];
                           }),
                  "read through a pointer of byte 8 of shared memory, where an asynchronous copy");
}

TEST(Pointers, OutOfBounds) {
  expect_contains(fault_of(1, 32, 100, [] { words()[ptx::lane_index()] = 1; }),
                  "write through a pointer of 4 bytes at byte 100 of shared memory");
}

TEST(Pointers, SingleBytesAndOtherMemory) {
  int64_t sum = 0;
  run_grid(1, 64, 64, [&] {
    char* bytes = ptx::shared_memory();
    bytes[ptx::thread_index()] = 1;  // neighbouring threads share half-words
    ptx::sync_block();
    sum += bytes[63 - ptx::thread_index()];
  });
  EXPECT_EQ(sum, 64);
}

}  // namespace
}  // namespace tilewise::cuda::emulator
