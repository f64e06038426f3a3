// Support for the tests of tensor memory and tcgen05.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cuda/ptx/block.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {

// Shared memory of the tests: the address of the allocated columns, four mbarriers, operands.
inline constexpr int kTensorAddressAt = 0;
inline constexpr int kBarriersAt = 64;
inline constexpr int kOperandsAt = 1024;

inline ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}
inline ptx::SharedAddress barrier(int i) { return byte(kBarriersAt + 8 * i); }
inline ptx::TensorAddress tensor() { return ptx::ld_shared_b32(byte(kTensorAddressAt)); }

// Tensor memory of a warp's lanes from `column` on.
inline ptx::TensorAddress own_lanes(int column) {
  return tensor() + (static_cast<uint32_t>(ptx::warp_index() % 4) << 21) +
         static_cast<uint32_t>(column);
}

// Runs body() between allocation and deallocation of all columns by warp 0, with mbarriers of one
// arrival. Returns the fault, or "".
template <class Body>
std::string fault_with_tensor_memory(int threads, int shared_bytes, Body body) {
  return fault_of(1, threads, shared_bytes, [&] {
    if (ptx::thread_index() == 0) {
      for (int i = 0; i < 4; ++i) ptx::mbarrier_init(barrier(i), 1);
      ptx::fence_mbarrier_init();
    }
    if (ptx::warp_index() == 0) {
      ptx::tcgen05_alloc(byte(kTensorAddressAt), ptx::kTensorColumns);
      ptx::tcgen05_relinquish_alloc_permit();
    }
    ptx::sync_block();
    body();
    ptx::tcgen05_fence_before();
    ptx::sync_block();
    ptx::tcgen05_fence_after();
    if (ptx::warp_index() == 0) ptx::tcgen05_dealloc(tensor(), ptx::kTensorColumns);
  });
}

// Flags in global memory: they keep threads waiting and order no access to tensor memory.
struct Flags {
  std::array<int32_t, 4> of_warp{};

  // Warps 0 to 3, where `sets` is true, set a flag each; a thread with `waits` waits for all four.
  void pass(bool sets, bool waits) {
    if (sets && ptx::lane_index() == 0) {
      ptx::st_release(&of_warp[static_cast<size_t>(ptx::warp_index())], 1);
    }
    for (const int32_t& flag : of_warp) {
      while (waits && ptx::ld_acquire(&flag) == 0) {
      }
    }
  }
};

// Runs a test with asynchronous operations that happen late and early.
template <class Test>
void late_and_early(Test test) {
  for (const char* copies : {"late", "early"}) {
    const Environment variable("TILEWISE_EMULATOR_COPIES", copies);
    test();
  }
}

}  // namespace tilewise::cuda::emulator
