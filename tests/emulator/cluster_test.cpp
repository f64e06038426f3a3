// Blocks that run together and access each other's shared memory.
#include "cuda/ptx/cluster.h"

#include <vector>

#include "cuda/ptx/block.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kThreads = 64;
constexpr int kPart = kThreads * 4;  // bytes that a block sends
constexpr int kLanded = 2 * kPart;
constexpr int kRead = kLanded + 8;
constexpr int kBytes = kRead + 8;

ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}
int rank() { return static_cast<int>(ptx::block_index() % 2); }

template <class Body>
std::string fault_of_pairs(Body body, int blocks = 2) {
  try {
    run_grid(
        blocks, kThreads, kBytes,
        [&] {
          if (ptx::thread_index() == 0) {
            ptx::mbarrier_init(byte(kLanded), 1);
            ptx::mbarrier_init(byte(kRead), kThreads);
            ptx::fence_mbarrier_init();
          }
          ptx::sync_cluster();
          body();
          ptx::sync_cluster();
        },
        2);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

void send(bool fence = true) {
  if (fence) ptx::fence_proxy_async();
  ptx::sync_block();
  if (ptx::thread_index() != 0) return;
  const int other = 1 - rank();
  ptx::mbarrier_arrive_expect_tx(byte(kLanded), kPart);
  ptx::cp_async_bulk_to_rank(ptx::map_to_rank(byte(kPart), other), byte(0), kPart,
                             ptx::map_to_rank(byte(kLanded), other));
}

void write(int step) {
  const int thread = ptx::thread_index();
  ptx::st_shared_b32(byte(4 * thread),
                     static_cast<uint32_t>(1000 * step + 100 * ptx::block_index() + thread));
}

TEST(Cluster, Exchange) {
  for (const char* copies : {"late", "early"}) {
    for (const char* order : {"forward", "reverse", "shuffled"}) {
      const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
      const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
      EXPECT_EQ(fault_of_pairs(
                    [] {
                      for (int step = 0; step < 5; ++step) {
                        const int parity = step & 1;
                        // The bytes sent before have arrived and have been read.
                        ptx::mbarrier_wait_parity(byte(kRead), parity ^ 1);
                        write(step);
                        send();
                        ptx::mbarrier_wait_parity(byte(kLanded), parity);
                        const int thread = ptx::thread_index();
                        ASSERT_EQ(ptx::ld_shared_b32(byte(kPart + 4 * thread)),
                                  1000 * step + 100 * (ptx::block_index() ^ 1) + thread);
                        ptx::mbarrier_arrive_remote(ptx::map_to_rank(byte(kRead), 1 - rank()));
                      }
                    },
                    6),
                "");
    }
  }
}

// Each of the first 14 blocks stores a word of each lane in all 14 and waits for those sent to it;
// the last two blocks have exited.
TEST(Cluster, StoresOfManyBlocks) {
  constexpr int kCluster = 16;
  constexpr int kStoring = kCluster - 2;
  constexpr int kLane = 16;
  constexpr int kBarrier = kCluster * ptx::kWarpSize * kLane;
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    run_grid(
        2 * kCluster, ptx::kWarpSize, kBarrier + 8,
        [] {
          const auto this_rank = static_cast<int>(ptx::block_index() % kCluster);
          const int lane = ptx::lane_index();
          if (this_rank >= kStoring) return;
          if (lane == 0) {
            ptx::mbarrier_init(byte(kBarrier), 1);
            ptx::fence_mbarrier_init();
          }
          ptx::barrier_cluster_arrive_relaxed();
          if (lane == 0)
            ptx::mbarrier_arrive_expect_tx(byte(kBarrier), kStoring * ptx::kWarpSize * kLane);
          ptx::barrier_cluster_wait();
          const auto word = [](int from, int to, int of_lane) {
            return static_cast<uint32_t>(10000 * from + 100 * to + of_lane);
          };
          for (int to = 0; to < kStoring; ++to) {
            const uint32_t x[4] = {word(this_rank, to, lane)};
            ptx::st_async_v4_b32(
                ptx::map_to_rank(byte((this_rank * ptx::kWarpSize + lane) * kLane), to), x,
                ptx::map_to_rank(byte(kBarrier), to));
          }
          ptx::mbarrier_wait_parity(byte(kBarrier), 0);
          for (int from = 0; from < kStoring; ++from)
            ASSERT_EQ(ptx::ld_shared_b32(byte((from * ptx::kWarpSize + lane) * kLane)),
                      word(from, this_rank, lane));
        },
        kCluster);
  }
}

TEST(Cluster, FaultsOfTheExchange) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    const auto wait = [] { ptx::mbarrier_wait_parity(byte(kLanded), 0); };
    expect_contains(fault_of_pairs([&] {
                      write(0);
                      send(false);
                      wait();
                    }),
                    "with no fence_proxy_async before the barrier");
    expect_contains(fault_of_pairs([&] {
                      write(0);
                      send();
                      if (ptx::thread_index() == 7) ptx::ld_shared_b32(byte(kPart));
                      wait();
                    }),
                    "of byte 256 of shared memory, wh");
    // The other block is still reading the bytes that are sent again.
    expect_contains(fault_of_pairs([&] {
                      write(0);
                      send();
                      wait();
                      ptx::ld_shared_b32(byte(kPart));
                      write(1);
                      send();
                      ptx::mbarrier_wait_parity(byte(kLanded), 1);
                    }),
                    "of shared memory, wh");
    expect_contains(fault_of_pairs([&] {
                      if (ptx::thread_index() == 0) ptx::map_to_rank(byte(0), 2);
                    }),
                    "block 2 of a cluster of 2");
  }
  const std::string message = fault_of_pairs([] {
    if (rank() == 1) ptx::mbarrier_wait_parity(byte(kRead), 0);
    if (rank() == 0) ptx::mbarrier_arrive_remote(ptx::map_to_rank(byte(kRead), 0));
  });
  expect_contains(message, "deadlock");
  expect_contains(message, "block 0 of the cluster, warp 1: lanes 0-31 sync_cluster");
  expect_contains(message, "block 1 of the cluster, warp 0: lanes 0-31 parity 0 of the mbarrier");
}

// mbarriers, named barriers and registers belong to each block.
TEST(Cluster, StatePerBlock) {
  std::vector<int> met(4);
  run_grid(
      4, 256, 1024,
      [&] {
        if (ptx::block_index() % 2 == 1) {
          ptx::sync_block();
          ++met[ptx::block_index()];
          ptx::sync_block();
          if (ptx::warp_index() < 4) ptx::setmaxnreg_dec<24>();
        }
        ptx::bar_sync(1, 256);
        ptx::st_shared_b32(byte(4 * ptx::thread_index()),
                           static_cast<uint32_t>(ptx::block_index()));
        ptx::sync_cluster();
        ASSERT_EQ(ptx::ld_shared_b32(byte(4 * (255 - ptx::thread_index()))), ptx::block_index());
        if (ptx::warp_index() == 5) return;  // exited threads do not block the others
        ptx::sync_cluster();
      },
      2);
  EXPECT_EQ(met, (std::vector<int>{0, 256, 0, 256}));
}

TEST(Cluster, Launches) {
  const auto launch = [](int64_t blocks, int threads, int cluster) {
    try {
      run_grid(blocks, threads, 0, [] {}, cluster);
    } catch (const Fault& fault) {
      return std::string(fault.what());
    }
    return std::string();
  };
  EXPECT_EQ(launch(4, 512, 2), "");
  expect_contains(launch(3, 32, 2), "2 in a cluster: not whole warps or clusters");
  expect_contains(launch(4, 1024, 2), "2 in a cluster: not whole warps or clusters");
  EXPECT_EQ(launch(32, 32, 16), "");
  expect_contains(launch(32, 32, 32), "32 in a cluster");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
