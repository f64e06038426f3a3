// Tests of the faults that are detected in accesses to shared memory.
#include <vector>

#include "cuda/ptx/block.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}

TEST(Shared, ValuesOfEverySize) {
  run_grid(1, 32, 32 * 16, [] {
    const int lane = ptx::lane_index();
    const auto x = static_cast<uint32_t>(lane);
    ptx::st_shared_v4_b32(byte(lane * 16), {x, x + 1, x + 2, x + 3});
    uint32_t four[4];
    ptx::ld_shared_v4_b32(four, byte(lane * 16));
    uint32_t two[2];
    ptx::ld_shared_v2_b32(two, byte(lane * 16 + 8));
    for (uint32_t i = 0; i < 4; ++i) ASSERT_EQ(four[i], x + i);
    ASSERT_EQ(two[0], x + 2);
    ASSERT_EQ(two[1], x + 3);
    ptx::st_shared_b16(byte(lane * 16 + 2), 7);
    ASSERT_EQ(ptx::ld_shared_b32(byte(lane * 16)), x | 7 << 16);
  });
  EXPECT_EQ(statistics().shared_accesses, 32 * 5);
}

TEST(Shared, ReadOfUnwrittenBytes) {
  const std::string message = fault_of(3, 64, 1024, [] {
    ptx::st_shared_b32(byte(ptx::thread_index() * 4), 1);
    if (ptx::block_index() == 2 && ptx::thread_index() == 40) ptx::ld_shared_b32(byte(256 + 160));
  });
  expect_contains(message, "ld.shared of byte 416 of shared memory, which was not written");
  expect_contains(message, "block 2 of 3, thread 40 (warp 1, lane 8)");
}

TEST(Shared, ReadOfAnEarlierBlocksBytes) {
  const std::string message = fault_of(2, 32, 128, [] {
    if (ptx::block_index() == 0) ptx::st_shared_b32(byte(ptx::thread_index() * 4), 1);
    ptx::ld_shared_b32(byte(ptx::thread_index() * 4));
  });
  expect_contains(message, "which was not written");
  expect_contains(message, "block 1 of 2");
}

TEST(Shared, LoadMatrixOfUnwrittenBytes) {
  expect_contains(fault_of(1, 32, 1024,
                           [] {
                             if (ptx::lane_index() != 9) {
                               ptx::st_shared_v4_b32(byte(ptx::lane_index() * 16), {});
                             }
                             ptx::sync_warp();
                             uint32_t r[4];
                             ptx::ldmatrix_x4(r, byte(ptx::lane_index() * 16));
                           }),
                  "ldmatrix of byte 144 of shared memory, which was not written");
}

TEST(Shared, PlainPointersMarkBytesAsWritten) {
  run_grid(1, 32, 128, [] {
    auto* words = reinterpret_cast<uint32_t*>(ptx::shared_memory());
    words[ptx::lane_index()] = 5;
    ASSERT_EQ(ptx::ld_shared_b32(byte(ptx::lane_index() * 4)), 5u);
  });
  run_grid(1, 32, 128, [] {
    const auto* words = reinterpret_cast<const float*>(ptx::shared_memory());
    ASSERT_TRUE(words[3] != words[3]);  // poison is not a number
  });
}

TEST(Shared, OutOfBounds) {
  expect_contains(
      fault_of(1, 32, 128, [] { ptx::st_shared_b32(byte(4 + ptx::lane_index() * 4), 1); }),
      "st.shared of 4 bytes at byte 128 of shared memory; the launch requested 128 bytes");
  expect_contains(fault_of(1, 32, 128,
                           [] {
                             uint32_t r[4];
                             ptx::ld_shared_v4_b32(r, byte(0) - 16);
                           }),
                  "ld.shared of 16 bytes at byte -16");
  // An offset that is mistaken for an address.
  expect_contains(fault_of(1, 32, 128, [] { ptx::st_shared_b32(0, 1); }), "at byte -1024");
  expect_contains(fault_of(1, 32, 128, [] { ptx::cp_async_16(byte(120), nullptr, 0); }),
                  "cp.async of 16 bytes at byte 120");
  expect_contains(fault_of(1, 32, 128,
                           [] {
                             uint32_t r[4];
                             ptx::ldmatrix_x4(r, byte(128));
                           }),
                  "ldmatrix of 16 bytes at byte 128");
}

TEST(Shared, PlainPointerPastTheEnd) {
  expect_contains(fault_of(2, 32, 100,
                           [] {
                             auto* words =
                                 reinterpret_cast<volatile uint32_t*>(ptx::shared_memory());
                             words[ptx::lane_index() % 26] = 1;
                           }),
                  "byte 100 of shared memory was written; the launch requested 100 bytes");
}

TEST(Shared, Misaligned) {
  expect_contains(fault_of(1, 32, 128, [] { ptx::st_shared_b32(byte(2), 1); }), "not aligned");
  expect_contains(fault_of(1, 32, 128, [] { ptx::st_shared_v4_b32(byte(8), {}); }), "not aligned");
  expect_contains(fault_of(1, 32, 128, [] { ptx::cp_async_16(byte(8), nullptr, 0); }),
                  "not aligned");
  alignas(16) static const char source[32] = {};
  expect_contains(fault_of(1, 32, 128, [] { ptx::cp_async_16(byte(0), source + 4, 16); }),
                  "cp.async of 16 bytes at global address");
  expect_contains(fault_of(1, 32, 128,
                           [] {
                             uint32_t r[4];
                             ptx::ld_global_v4_b32(r, source + 8);
                           }),
                  "ld.global.v4");
  expect_contains(fault_of(1, 32, 1024,
                           [] {
                             ptx::st_shared_v4_b32(byte(ptx::lane_index() * 32), {});
                             ptx::st_shared_v4_b32(byte(ptx::lane_index() * 32 + 16), {});
                             ptx::sync_warp();
                             uint32_t r[4];
                             ptx::ldmatrix_x4(r, byte(ptx::lane_index() * 24));
                           }),
                  "not aligned");
}

TEST(Banks, ConflictsOfLoadsAndStores) {
  const Environment count("TILEWISE_EMULATOR_BANKS", "1");
  const auto conflicts = [](auto body) {
    run_grid(1, 32, 32 * 128, [&] { body(ptx::lane_index()); });
    return statistics().shared_conflicts;
  };
  const auto store = [](int at) { ptx::st_shared_b32(byte(at), 1); };
  EXPECT_EQ(conflicts([&](int lane) { store(lane * 4); }), 0);
  EXPECT_EQ(conflicts([&](int lane) { store(lane * 8); }), 1);
  EXPECT_EQ(conflicts([&](int lane) { store(lane * 128); }), 31);
  EXPECT_EQ(conflicts([&](int lane) { store(lane % 2 * 128); }),
            1);  // the other lanes repeat these two
  EXPECT_EQ(conflicts([&](int lane) {
              if (lane % 4 == 0) store(lane * 4);
            }),
            0);
  EXPECT_EQ(conflicts([&](int lane) { ptx::st_shared_v4_b32(byte(lane * 16), {}); }), 0);
  EXPECT_EQ(conflicts([&](int lane) { ptx::st_shared_v4_b32(byte(lane * 32), {}); }), 4);
  EXPECT_EQ(conflicts([&](int lane) {
              store(lane * 4);
              ptx::sync_warp();
              for (int i = 0; i < 4; ++i) ptx::ld_shared_b32(byte((lane + i) % 32 * 4));
            }),
            0);
}

// --- races ---------------------------------------------------------------------------------------

TEST(Races, ReadBeforeTheBarrier) {
  const auto exchange = [](bool with_barrier) {
    const int thread = ptx::thread_index();
    ptx::st_shared_b32(byte(thread * 4), 1);
    if (with_barrier) ptx::sync_block();
    ptx::ld_shared_b32(byte((thread + 32) % 64 * 4));
  };
  EXPECT_EQ(fault_of(2, 64, 256, [&] { exchange(true); }), "");
  expect_contains(fault_of(2, 64, 256,
                           [&] {
                             // Warp 0 has already written what warp 1 reads, but no barrier is
                             // between.
                             if (ptx::warp_index() == 1) return exchange(false);
                             ptx::st_shared_b32(byte(ptx::thread_index() * 4), 1);
                           }),
                  "which thread 0 wrote with no sync_block between");
}

TEST(Races, WarpBarrierOrdersItsLanes) {
  const auto exchange = [](bool with_barrier) {
    const int lane = ptx::lane_index();
    for (uint32_t i = 0; i < 3; ++i) {
      ptx::st_shared_b32(byte(lane * 4), i);
      if (with_barrier) ptx::sync_warp();
      const int before = lane == 0 ? 0 : lane - 1;  // lane 31 runs last
      ASSERT_EQ(ptx::ld_shared_b32(byte(before * 4)), i);
      if (with_barrier) ptx::sync_warp();
    }
  };
  EXPECT_EQ(fault_of(1, 32, 128, [&] { exchange(true); }), "");
  expect_contains(fault_of(1, 32, 128, [&] { exchange(false); }), "sync_warp between");
}

TEST(Races, WriteOverBytesBeingRead) {
  const auto ring = [](bool with_barrier) {
    for (uint32_t i = 0; i < 2; ++i) {
      if (ptx::warp_index() == 0) ptx::st_shared_b32(byte(ptx::lane_index() * 4), i);
      ptx::sync_block();
      ASSERT_EQ(ptx::ld_shared_b32(byte(ptx::lane_index() * 4)), i);
      if (with_barrier) ptx::sync_block();
    }
  };
  EXPECT_EQ(fault_of(1, 64, 128, [&] { ring(true); }), "");
  expect_contains(fault_of(1, 64, 128, [&] { ring(false); }), "race: st.shared of byte");
}

TEST(Races, TwoWritersOfDifferentValues) {
  EXPECT_EQ(fault_of(1, 64, 4, [] { ptx::st_shared_b32(byte(0), 3); }), "");
  expect_contains(
      fault_of(1, 64, 4,
               [] { ptx::st_shared_b32(byte(0), static_cast<uint32_t>(ptx::warp_index())); }),
      "which thread 31 wrote with no sync_block between");
  // Neighbouring half-words are distinct.
  EXPECT_EQ(fault_of(1, 64, 128,
                     [] {
                       const int i = ptx::thread_index() * 2;
                       ptx::st_shared_b16(byte(i), static_cast<uint16_t>(i));
                     }),
            "");
}

TEST(Races, CopyOverBytesBeingRead) {
  alignas(16) static const uint32_t source[4] = {1, 2, 3, 4};
  const auto ring = [](bool with_barrier) {
    for (int i = 0; i < 2; ++i) {
      if (ptx::thread_index() == 0) {
        ptx::cp_async_16(byte(0), source);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
      }
      ptx::sync_block();
      ASSERT_EQ(ptx::ld_shared_b32(byte(ptx::thread_index() % 4 * 4)),
                1u + static_cast<uint32_t>(ptx::thread_index()) % 4);
      if (with_barrier) ptx::sync_block();
    }
  };
  EXPECT_EQ(fault_of(1, 64, 128, [&] { ring(true); }), "");
  const Environment reverse("TILEWISE_EMULATOR_ORDER", "reverse");
  expect_contains(fault_of(1, 64, 128, [&] { ring(false); }), "race: cp.async of byte");
}

TEST(Races, DetectionCanBeSwitchedOff) {
  const Environment off("TILEWISE_EMULATOR_RACES", "0");
  EXPECT_EQ(fault_of(1, 64, 4,
                     [] { ptx::st_shared_b32(byte(0), static_cast<uint32_t>(ptx::warp_index())); }),
            "");
}

// --- asynchronous copies -------------------------------------------------------------------------

struct Copies {
  alignas(16) uint32_t source[64];
  Copies() {
    for (uint32_t i = 0; i < 64; ++i) source[i] = i;
  }
};

TEST(Copies, LandAsLateOrAsEarlyAsPossible) {
  const Copies all;
  const auto before_and_after = [&] {
    const volatile auto* raw = reinterpret_cast<uint32_t*>(ptx::shared_memory());
    if (ptx::thread_index() != 0) return 0u;
    ptx::cp_async_16(byte(0), all.source + 4);
    ptx::cp_async_commit_group();
    const uint32_t before = raw[0];
    ptx::cp_async_wait_group<0>();
    EXPECT_EQ(raw[0], 4u);
    return before;
  };
  uint32_t before = 0;
  run_grid(1, 32, 16, [&] { before |= before_and_after(); });
  EXPECT_EQ(before, 0x7fb57fb5u);
  before = 0;
  const Environment early("TILEWISE_EMULATOR_COPIES", "early");
  run_grid(1, 32, 16, [&] { before |= before_and_after(); });
  EXPECT_EQ(before, 4u);
}

TEST(Copies, BytesNotReadAreZeroFilled) {
  const Copies all;
  run_grid(1, 32, 64, [&] {
    if (ptx::thread_index() != 0) return;
    ptx::cp_async_16(byte(0), all.source + 8, 8);
    ptx::cp_async_16(byte(16), nullptr, 0);
    ptx::cp_async_4(byte(32), all.source + 9, 4);
    ptx::cp_async_4(byte(36), all.source + 9, 2);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    const uint32_t expected[10] = {8, 9, 0, 0, 0, 0, 0, 0, 9, 9};
    for (int i = 0; i < 10; ++i) ASSERT_EQ(ptx::ld_shared_b32(byte(i * 4)), expected[i]) << i;
  });
  EXPECT_EQ(statistics().copied_bytes, 8 + 4 + 2);
}

// With three groups in flight, the last `kPending` may still be in flight after the wait.
template <int kPending>
std::string read_group(int group) {
  static const Copies all;
  return fault_of(1, 32, 64, [&] {
    if (ptx::thread_index() != 0) return;
    for (int i = 0; i < 3; ++i) {
      ptx::cp_async_16(byte(i * 16), all.source + i * 4);
      ptx::cp_async_commit_group();
    }
    ptx::cp_async_wait_group<kPending>();
    ASSERT_EQ(ptx::ld_shared_b32(byte(group * 16)), static_cast<uint32_t>(group) * 4);
  });
}

void check_wait_counts() {
  const std::string in_flight = "where an asynchronous copy is in flight";
  EXPECT_EQ(read_group<0>(2), "");
  EXPECT_EQ(read_group<1>(1), "");
  expect_contains(read_group<1>(2), in_flight);
  EXPECT_EQ(read_group<2>(0), "");
  expect_contains(read_group<2>(1), in_flight);
  expect_contains(read_group<3>(0), in_flight);
}

TEST(Copies, WaitCountsGroupsLate) { check_wait_counts(); }
TEST(Copies, WaitCountsGroupsEarly) {
  const Environment early("TILEWISE_EMULATOR_COPIES", "early");
  check_wait_counts();
}

// All lanes copy a chunk each and arrive after it; then lane 0 reads the chunk of lane 31.
std::string read_after_barrier(bool arrive, bool wait) {
  static const Copies all;
  return fault_of(1, 32, 1024, [&] {
    const int lane = ptx::thread_index();
    if (lane == 0) ptx::mbarrier_init(byte(512), 32);
    ptx::sync_warp();
    ptx::cp_async_16(byte(lane * 16), all.source + lane % 3 * 4);
    if (arrive || lane != 31) ptx::cp_async_mbarrier_arrive(byte(512));
    if (wait) ptx::mbarrier_wait_parity(byte(512), 0);
    if (lane != 0) return;
    ASSERT_EQ(ptx::ld_shared_b32(byte(31 * 16)), 31u % 3 * 4);
  });
}

void check_barriers() {
  EXPECT_EQ(read_after_barrier(true, true), "");
  EXPECT_NE(read_after_barrier(true, false), "");
  expect_contains(read_after_barrier(false, true), "31 of 32 arrivals");
}

TEST(Copies, BarriersCountCopiesLate) { check_barriers(); }
TEST(Copies, BarriersCountCopiesEarly) {
  const Environment early("TILEWISE_EMULATOR_COPIES", "early");
  check_barriers();
}

// Copies in a group land when the group is waited for; only ungrouped ones precede the arrival.
TEST(Copies, BarriersDoNotCountGroups) {
  static const Copies all;
  EXPECT_EQ(fault_of(1, 32, 1024,
                     [] {
                       if (ptx::thread_index() != 0) return;
                       ptx::mbarrier_init(byte(512), 1);
                       ptx::cp_async_16(byte(0), all.source);
                       ptx::cp_async_commit_group();
                       ptx::cp_async_16(byte(16), all.source + 4);
                       ptx::cp_async_mbarrier_arrive(byte(512));
                       ptx::mbarrier_wait_parity(byte(512), 0);
                       ASSERT_EQ(ptx::ld_shared_b32(byte(16)), 4u);
                       ptx::cp_async_wait_group<0>();
                       ASSERT_EQ(ptx::ld_shared_b32(byte(0)), 0u);
                     }),
            "");
}

TEST(Copies, WaitDoesNotCoverUncommittedCopies) {
  static const Copies all;
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             ptx::cp_async_16(byte(0), all.source);
                             ptx::cp_async_wait_group<0>();
                             ptx::ld_shared_b32(byte(0));
                           }),
                  "in flight");
}

TEST(Copies, WaitCoversOnlyOwnCopies) {
  static const Copies all;
  expect_contains(fault_of(1, 32, 64,
                           [] {
                             if (ptx::thread_index() == 0) ptx::cp_async_16(byte(0), all.source);
                             ptx::cp_async_commit_group();
                             if (ptx::thread_index() != 0) ptx::cp_async_wait_group<0>();
                             ptx::sync_block();
                             ptx::ld_shared_b32(byte(0));
                           }),
                  "in flight");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
