// Tests of barriers, deadlocks, flags, launches, and the order of blocks.
#include <thread>
#include <vector>

#include "cuda/ptx/block.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

TEST(Meeting, BarrierOfTheBlock) {
  std::vector<int> arrived(5);
  run_grid(1, 128, 0, [&] {
    for (int& count : arrived) {
      ++count;
      ptx::sync_block();
      ASSERT_EQ(count, 128);
    }
  });
  EXPECT_EQ(statistics().block_barriers, 5);
}

TEST(Meeting, WarpsNeedNotMeet) {
  EXPECT_EQ(fault_of(1, 64, 0,
                     [] {
                       if (ptx::warp_index() == 0) ptx::shuffle_xor(1.0f, 1);
                       ptx::sync_block();
                     }),
            "");
}

TEST(Deadlock, LanesInDifferentInstructions) {
  expect_contains(fault_of(1, 64, 0,
                           [] {
                             if (ptx::lane_index() < 3) {
                               ptx::any(true);
                             } else {
                               ptx::shuffle_xor(1.0f, 1);
                             }
                           }),
                  "this one in shuffle_xor, lanes 0-2 in any");
}

TEST(Deadlock, LanesInBarrierAndCollective) {
  const std::string message = fault_of(1, 64, 0, [] {
    if (ptx::thread_index() == 33) {
      ptx::sync_block();
    } else {
      ptx::sync_warp();
    }
    ptx::sync_block();
  });
  expect_contains(message, "deadlock");
  expect_contains(message, "warp 0: lanes 0-31 sync_block");
  expect_contains(message, "warp 1: lanes 0,2-31 sync_warp; lanes 1 sync_block");
}

TEST(Deadlock, ExitedLaneInCollective) {
  expect_contains(fault_of(1, 32, 0,
                           [] {
                             if (ptx::lane_index() == 0) return;
                             float d[4] = {};
                             ptx::mma_m16n8k8_f16(d, 0, 0, 0);
                           }),
                  "mma_m16n8k8_f16 needs all threads, but lanes 0 of warp 0 have exited");
  expect_contains(fault_of(1, 32, 0,
                           [] {
                             if (ptx::lane_index() == 31) return;
                             ptx::sync_warp();
                           }),
                  "the thread exits while lanes 0-30 of its warp wait in sync_warp");
}

TEST(Deadlock, ExitedThreadInBarrier) {
  expect_contains(fault_of(1, 64, 0,
                           [] {
                             if (ptx::thread_index() != 63) ptx::sync_block();
                           }),
                  "exits while others wait in sync_block");
  expect_contains(fault_of(1, 64, 0,
                           [] {
                             if (ptx::thread_index() != 0) ptx::sync_block();
                           }),
                  "sync_block needs all threads");
}

TEST(Flags, ThreadsOfABlockWaitForFlags) {
  int32_t flag = 0;
  std::vector<int> order;
  run_grid(1, 64, 0, [&] {
    while (ptx::ld_acquire(&flag) != 63 - ptx::thread_index()) {
    }
    order.push_back(ptx::thread_index());
    ptx::st_release(&flag, flag + 1);
  });
  ASSERT_EQ(order.size(), 64u);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(order[i], 63 - i);
}

TEST(Flags, BlocksWaitForEarlierBlocks) {
  int32_t turn = 0;
  const auto take_turn = [&] {
    while (ptx::ld_acquire(&turn) != ptx::block_index()) {
    }
    ptx::sync_block();
    if (ptx::thread_index() == 0) ptx::st_release(&turn, turn + 1);
  };
  run_grid(8, 32, 0, take_turn);
  EXPECT_EQ(turn, 8);
  turn = 0;
  const Environment reverse("TILEWISE_EMULATOR_ORDER", "reverse");
  const std::string message = fault_of(8, 32, 0, take_turn);
  expect_contains(message, "waits for a flag that no running thread will write");
  expect_contains(message, "lanes 0-31 ld_acquire");
}

std::vector<int64_t> order_of_blocks() {
  std::vector<int64_t> order;
  run_grid(20, 32, 0, [&] {
    if (ptx::thread_index() == 0) order.push_back(ptx::block_index());
  });
  return order;
}

TEST(Order, OfBlocks) {
  std::vector<int64_t> forward(20);
  for (int i = 0; i < 20; ++i) forward[i] = i;
  EXPECT_EQ(order_of_blocks(), forward);
  {
    const Environment reverse("TILEWISE_EMULATOR_ORDER", "reverse");
    EXPECT_EQ(order_of_blocks(), std::vector<int64_t>(forward.rbegin(), forward.rend()));
  }
  {
    const Environment warps("TILEWISE_EMULATOR_ORDER", "warps");
    EXPECT_EQ(order_of_blocks(), forward);
  }
  const Environment shuffled("TILEWISE_EMULATOR_ORDER", "shuffled");
  std::vector<int64_t> order = order_of_blocks();
  EXPECT_NE(order, forward);
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, forward);
}

TEST(Launch, RefusesImpossibleLaunches) {
  expect_contains(fault_of(1, 33, 0, [] {}), "not whole warps");
  expect_contains(fault_of(1, 2048, 0, [] {}), "launch");
  expect_contains(fault_of(1, 32, 300 * 1024, [] {}), "launch");
  expect_contains(fault_of(1, 32, 0, [] { run_grid(1, 32, 0, [] {}); }), "launches a kernel");
  EXPECT_EQ(fault_of(1, 1024, 227 * 1024, [] {}), "");
  EXPECT_EQ(fault_of(0, 32, 0, [] { FAIL(); }), "");
}

TEST(Launch, RunsAgainAfterAFault) {
  EXPECT_NE(fault_of(4, 32, 0, [] { ptx::st_shared_b32(1024, 1); }), "");
  int runs = 0;
  run_grid(1, 32, 0, [&] { ++runs; });
  EXPECT_EQ(runs, 32);
}

TEST(Launch, UnknownSwitch) {
  const Environment wrong("TILEWISE_EMULATOR_COPIES", "sometimes");
  expect_contains(fault_of(1, 32, 0, [] {}), "early or late");
}

TEST(Launch, ConcurrentHostThreads) {
  const auto sum = [](int64_t* result) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      run_grid(2, 128, 512, [&] {
        const int thread = ptx::thread_index();
        const ptx::SharedAddress base = ptx::shared_address(ptx::shared_memory());
        ptx::st_shared_b32(base + thread * 4, static_cast<uint32_t>(thread));
        ptx::sync_block();
        *result += ptx::ld_shared_b32(base + (127 - thread) * 4);
      });
    }
  };
  int64_t sums[2] = {};
  std::thread other(sum, &sums[0]);
  sum(&sums[1]);
  other.join();
  EXPECT_EQ(sums[0], 20 * 2 * 127 * 64);
  EXPECT_EQ(sums[1], sums[0]);
}

}  // namespace
}  // namespace tilewise::cuda::emulator
