// Tests of mbarriers, named barriers and the register pool: which thread waits, and what is
// ordered.
#include <vector>

#include "cuda/ptx/block.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}

void init(int place, int arrivals) {
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(byte(place), arrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
}

TEST(Mbarrier, InitialParity) {
  run_grid(1, 32, 64, [] {
    init(0, 1);
    ptx::mbarrier_wait_parity(byte(0), 1);
  });
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 1);
                             ptx::mbarrier_wait_parity(byte(0), 0);
                           }),
                  "lanes 0-31 parity 0 of the mbarrier at byte 0 (phase 0, 0 of 1 arrivals)");
}

// Producer and consumers of a ring of two stages.
TEST(Mbarrier, Ring) {
  constexpr int kSteps = 7;
  for (const char* order : {"forward", "reverse", "shuffled", "warps"}) {
    const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
    std::vector<uint32_t> sums(64);
    run_grid(1, 96, 64, [&] {
      if (ptx::thread_index() == 0) {
        for (int stage = 0; stage < 2; ++stage) {
          ptx::mbarrier_init(byte(16 + 16 * stage), 1);
          ptx::mbarrier_init(byte(24 + 16 * stage), 64);
        }
      }
      ptx::sync_block();
      const int thread = ptx::thread_index();
      for (int step = 0; step < kSteps; ++step) {
        const int stage = step % 2;
        const int parity = step / 2 & 1;
        if (thread == 64) {
          ptx::mbarrier_wait_parity(byte(24 + 16 * stage), parity ^ 1);
          ptx::st_shared_b32(byte(4 * stage), static_cast<uint32_t>(step * step));
          ptx::mbarrier_arrive(byte(16 + 16 * stage));
        } else if (thread < 64) {
          ptx::mbarrier_wait_parity(byte(16 + 16 * stage), parity);
          sums[thread] += ptx::ld_shared_b32(byte(4 * stage));
          ptx::mbarrier_arrive(byte(24 + 16 * stage));
        }
      }
    });
    EXPECT_EQ(sums, std::vector<uint32_t>(64, 0 + 1 + 4 + 9 + 16 + 25 + 36));
  }
}

TEST(Mbarrier, Misuse) {
  expect_contains(fault_of(1, 32, 64, [] { ptx::mbarrier_arrive(byte(8)); }),
                  "mbarrier_arrive at byte 8 of shared memory, where no mbarrier was initialised");
  expect_contains(fault_of(1, 32, 64, [] { ptx::mbarrier_init(byte(8), 1); }),
                  "where an mbarrier is in use");
  expect_contains(fault_of(1, 32, 64, [] { ptx::mbarrier_init(byte(8), 0); }), "with 0 arrivals");
  expect_contains(fault_of(1, 32, 64, [] { ptx::mbarrier_init(byte(4), 1); }), "not aligned");
  expect_contains(fault_of(1, 32, 64, [] { ptx::mbarrier_init(byte(64), 1); }),
                  "the launch requested 64");
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 1);
                             ptx::mbarrier_wait_parity(byte(0), 2);
                           }),
                  "parity 2");
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 1);
                             ptx::mbarrier_arrive_expect_tx(byte(0), 16);
                           }),
                  "mbarrier_arrive beyond the 1 arrivals of a phase");
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 32);
                             ptx::mbarrier_arrive_expect_tx(byte(0), 1 << 19);
                           }),
                  "more bytes are expected than an mbarrier can count");
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 1);
                             ptx::ld_shared_b32(byte(4));
                           }),
                  "ld.shared of byte 4 of shared memory, where an mbarrier is");
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             init(0, 1);
                             ptx::st_shared_b32(byte(0), 0);
                           }),
                  "st.shared of byte 0 of shared memory, where an mbarrier is");
}

TEST(Mbarrier, UseBeforeInitialisationIsVisible) {
  expect_contains(
      fault_of(1, 64, 64,
               [] {
                 if (ptx::thread_index() == 0) ptx::mbarrier_init(byte(0), 64);
                 ptx::mbarrier_arrive(byte(0));
               }),
      "mbarrier at byte 0 of shared memory, which thread 0 initialised with no sync_block");
}

TEST(Mbarrier, DeadlockNamesArrivalsAndBytes) {
  const std::string message = fault_of(1, 64, 64, [] {
    init(0, 3);
    if (ptx::thread_index() == 5) ptx::mbarrier_arrive_expect_tx(byte(0), 256);
    if (ptx::thread_index() < 32) ptx::mbarrier_wait_parity(byte(0), 0);
    ptx::bar_sync(2, 64);
  });
  expect_contains(message, "deadlock");
  expect_contains(
      message,
      "warp 0: lanes 0-31 parity 0 of the mbarrier at byte 0 (phase 0, 1 of 3 arrivals, 256 "
      "bytes to come, 0 in flight)");
  expect_contains(message, "warp 1: lanes 0-31 bar_sync of barrier 2 (32 of 64 threads)");
}

// A barrier that advances past a waiting thread: the second of two phases has the same parity.
TEST(Mbarrier, PhasesAdvancePastAWaitingThread) {
  expect_contains(fault_of(1, 64, 64,
                           [] {
                             init(0, 1);
                             init(8, 1);
                             if (ptx::thread_index() == 0) {
                               ptx::mbarrier_arrive(byte(8));
                               ptx::mbarrier_wait_parity(byte(0), 0);
                             } else if (ptx::thread_index() == 32) {
                               ptx::mbarrier_wait_parity(byte(8), 0);
                               ptx::mbarrier_arrive(byte(0));
                               ptx::mbarrier_arrive(byte(0));
                             }
                           }),
                  "2 phases ended while the thread waited for one");
}

// Thread 0 of warp 0 writes and thread 0 of warp 1 reads, or the other way round.
std::string hand_over(bool arrive_last, bool write_first) {
  return fault_of(1, 64, 64, [&] {
    init(0, 1);
    if (ptx::lane_index() != 0) return;
    const bool first = ptx::warp_index() == 0;
    const auto touch = [&] {
      if (first == write_first) {
        ptx::st_shared_b32(byte(16), 1);
      } else if (first) {
        ptx::st_shared_b32(byte(16), 1);
        ptx::ld_shared_b32(byte(16));
      } else {
        ptx::st_shared_b32(byte(16), 2);
      }
    };
    if (first) {
      if (arrive_last) touch();
      ptx::mbarrier_arrive(byte(0));
      if (!arrive_last) touch();
    } else {
      ptx::mbarrier_wait_parity(byte(0), 0);
      if (write_first) {
        ptx::ld_shared_b32(byte(16));
      } else {
        touch();
      }
    }
  });
}

TEST(Mbarrier, OrdersAccessesBeforeTheArrival) {
  for (const char* order : {"forward", "reverse"}) {
    const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
    EXPECT_EQ(hand_over(true, true), "");
    EXPECT_EQ(hand_over(true, false), "");
    EXPECT_NE(hand_over(false, true), "");
    expect_contains(hand_over(false, false), "race");
  }
}

// One lane arrives on behalf of its warp.
std::string arrive_for_the_warp(bool sync, bool many_readers) {
  return fault_of(1, 96, 1024, [&] {
    init(0, many_readers ? 2 : 1);
    const int warp = ptx::warp_index();
    if (ptx::thread_index() == 64) ptx::st_shared_b32(byte(512), 1);
    ptx::sync_block();
    if (warp < (many_readers ? 2 : 1)) {
      ptx::ld_shared_b32(byte(512));
      if (sync) ptx::sync_warp();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(byte(0));
    } else if (warp == 2) {
      ptx::mbarrier_wait_parity(byte(0), 0);
      if (ptx::lane_index() == 0) ptx::st_shared_b32(byte(512), 2);
    }
  });
}

TEST(Mbarrier, OneLaneArrivesForItsWarp) {
  EXPECT_EQ(arrive_for_the_warp(true, false), "");
  EXPECT_EQ(arrive_for_the_warp(true, true), "");
  expect_contains(arrive_for_the_warp(false, false), "race: st.shared of byte 512");
  expect_contains(arrive_for_the_warp(false, true), "race: st.shared of byte 512");
}

// One lane waits on behalf of its warp.
std::string wait_for_the_warp(bool sync) {
  return fault_of(1, 64, 64, [&] {
    init(0, 1);
    if (ptx::thread_index() == 32) {
      ptx::st_shared_b32(byte(16), 1);
      ptx::mbarrier_arrive(byte(0));
    } else if (ptx::warp_index() == 0) {
      if (ptx::lane_index() == 31) ptx::mbarrier_wait_parity(byte(0), 0);
      if (sync) {
        ptx::sync_warp();
      } else {
        ptx::shuffle(1.0f, 31);
      }
      ptx::ld_shared_b32(byte(16));
    }
  });
}

TEST(Mbarrier, OneLaneWaitsForItsWarp) {
  EXPECT_EQ(wait_for_the_warp(true), "");
  expect_contains(wait_for_the_warp(false), "race: ld.shared of byte 16");
}

TEST(NamedBarrier, AnyReachesAllThreads) {
  EXPECT_EQ(fault_of(1, 128, 0,
                     [] {
                       const int thread = ptx::thread_index();
                       for (const int chosen : {0, 127, -1, 64, -1, 3})
                         ASSERT_EQ(ptx::bar_any(1, 128, thread == chosen), chosen >= 0);
                       ptx::bar_sync(1, 128);
                       ASSERT_EQ(ptx::bar_any(1, 128, false), false);
                     }),
            "");
}

TEST(NamedBarrier, OrdersItsParticipants) {
  const auto exchange = [](bool third) {
    return fault_of(1, 96, 512, [&] {
      const int thread = ptx::thread_index();
      if (thread < 64) {
        ptx::st_shared_b32(byte(4 * thread), static_cast<uint32_t>(thread));
        ptx::bar_sync(1, 64);
        ASSERT_EQ(ptx::ld_shared_b32(byte(4 * (63 - thread))), static_cast<uint32_t>(63 - thread));
        ptx::bar_arrive(2, 96);
      } else if (third) {
        ptx::bar_sync(2, 96);
        ptx::st_shared_b32(byte(4 * (thread - 64)), 0);
      } else {
        ptx::bar_arrive(2, 96);  // does not wait
        ptx::st_shared_b32(byte(4 * (thread - 64)), 0);
      }
    });
  };
  for (const char* order : {"forward", "reverse"}) {
    const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
    EXPECT_EQ(exchange(true), "");
    expect_contains(exchange(false), "race");
  }
}

TEST(NamedBarrier, Misuse) {
  expect_contains(fault_of(1, 64, 0, [] { ptx::bar_sync(0, 64); }),
                  "bar_sync of barrier 0: it must be 1 to 15");
  expect_contains(fault_of(1, 64, 0, [] { ptx::bar_arrive(16, 64); }), "bar_arrive of barrier 16");
  expect_contains(fault_of(1, 64, 0, [] { ptx::bar_sync(1, 48); }),
                  "with 48 threads: it must be whole warps");
  expect_contains(fault_of(1, 64, 0, [] { ptx::bar_sync(1, 96); }),
                  "at most the 64 threads of the block");
  expect_contains(fault_of(1, 64, 0, [] { ptx::bar_sync(1, ptx::warp_index() == 0 ? 64 : 32); }),
                  "with 32 threads, but others use it with 64");
}

template <int kDec, int kInc>
std::string move_registers(bool all_warps = true) {
  return fault_of(1, 384, 0, [all_warps] {
    if (ptx::warp_index() < 4) {
      if (all_warps || ptx::warp_index() != 2) ptx::setmaxnreg_dec<kDec>();
    } else {
      ptx::setmaxnreg_inc<kInc>();
    }
  });
}

TEST(Registers, Pool) {
  // 384 threads start with 168 registers each.
  EXPECT_EQ((move_registers<24, 240>()), "");
  EXPECT_EQ((move_registers<40, 232>()), "");
  const std::string message = move_registers<32, 240>();
  expect_contains(message, "deadlock");
  expect_contains(message, "lanes 0-31 setmaxnreg_inc to 240 (");
  expect_contains((move_registers<176, 240>()),
                  "setmaxnreg_dec to 176 registers: the warp has only 168");
  expect_contains((move_registers<24, 160>()),
                  "setmaxnreg_inc to 160 registers: the warp already has 168");
  expect_contains((move_registers<20, 240>()), "24 to 256 in steps of 8");
  expect_contains((move_registers<24, 168>(false)),
                  "warp 0 with 24 registers and warp 2 of its warpgroup with 168");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
