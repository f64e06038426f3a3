// Tensor memory: its allocation, its loads and stores, and the faults that are detected.
#include <vector>

#include "emulator/tensor_test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kThreads = 256;  // two warps can access each quarter of the lanes
constexpr int kBytes = kOperandsAt;

template <class Body>
std::string fault_of_accesses(Body body) {
  return fault_with_tensor_memory(kThreads, kBytes, body);
}

bool in_warps(int begin, int end) { return ptx::warp_index() >= begin && ptx::warp_index() < end; }

void store(int column, uint32_t value = 1) {
  uint32_t d[16];
  for (uint32_t& x : d) x = value;
  ptx::tcgen05_st(own_lanes(column), d);
}

uint32_t load(int column) {
  uint32_t d[16];
  ptx::tcgen05_ld(d, own_lanes(column));
  ptx::tcgen05_wait_ld(d);
  return d[0];
}

void sync_with_fences() {
  ptx::tcgen05_fence_before();
  ptx::sync_block();
  ptx::tcgen05_fence_after();
}

template <int kN>
void check_round_trip() {
  std::vector<uint32_t> read(kThreads * kN);
  EXPECT_EQ(fault_of_accesses([&] {
              uint32_t d[kN];
              const auto own = static_cast<uint32_t>(ptx::thread_index()) << 16;
              for (int i = 0; i < kN; ++i) d[i] = own + static_cast<uint32_t>(i);
              if (in_warps(0, 4)) {
                ptx::tcgen05_st(own_lanes(256), d);
                ptx::tcgen05_wait_st();
              }
              sync_with_fences();
              ptx::tcgen05_ld(d, own_lanes(256));
              ptx::tcgen05_wait_ld(d);
              for (int i = 0; i < kN; ++i) {
                read[static_cast<size_t>(ptx::thread_index() * kN + i)] = d[i];
              }
            }),
            "");
  for (size_t thread = 0; thread < kThreads; ++thread) {
    for (size_t i = 0; i < kN; ++i) ASSERT_EQ(read[thread * kN + i], (thread % 128 << 16) + i);
  }
  EXPECT_EQ(statistics().tensor_stores, 4 * kN);
  EXPECT_EQ(statistics().tensor_loads, 8 * kN);
}

TEST(TensorMemory, LanesReadWhatOtherWarpsOfTheirQuarterWrote) {
  late_and_early([] {
    check_round_trip<16>();
    check_round_trip<32>();
    check_round_trip<64>();
    check_round_trip<128>();
  });
}

TEST(TensorMemory, LoadsArePoisonUntilTheyAreWaitedFor) {
  EXPECT_EQ(fault_of_accesses([] {
              if (!in_warps(0, 1)) return;
              store(0, 7);
              ptx::tcgen05_wait_st();
              uint32_t d[16];
              ptx::tcgen05_ld(d, own_lanes(0));
              ASSERT_NE(d[3], 7u);
              ptx::tcgen05_wait_ld(d);
              ASSERT_EQ(d[3], 7u);
            }),
            "");
}

// --- allocation ----------------------------------------------------------------------------------

template <class Body>
std::string fault_of_allocation(Body body) {
  return fault_of(1, 64, kBytes, body);
}

TEST(TensorMemoryFaults, SizesOfAllocations) {
  for (const int columns : {0, 16, 48, 500, 1024}) {
    expect_contains(
        fault_of_allocation([columns] { ptx::tcgen05_alloc(byte(0), columns); }),
        "tcgen05_alloc of " + std::to_string(columns) + " columns: it must be 32, 64, 128, 256");
  }
  expect_contains(fault_of_allocation([] {
                    if (ptx::warp_index() != 0) return;
                    ptx::tcgen05_alloc(byte(0), 256);
                    ptx::tcgen05_alloc(byte(4), 256);
                    ptx::tcgen05_alloc(byte(8), 32);
                  }),
                  "waits forever: 512 of 512 are allocated");
}

TEST(TensorMemoryFaults, AllocationWithoutPermitOrByAnotherWarp) {
  expect_contains(fault_of_allocation([] {
                    if (ptx::warp_index() != 0) return;
                    ptx::tcgen05_relinquish_alloc_permit();
                    ptx::tcgen05_alloc(byte(0), 32);
                  }),
                  "tcgen05_alloc after tcgen05_relinquish_alloc_permit");
  expect_contains(fault_of_allocation([] { ptx::tcgen05_alloc(byte(4 * ptx::warp_index()), 32); }),
                  "tcgen05_alloc by warp 1, but warp 0 has allocated before");
}

TEST(TensorMemoryFaults, Deallocation) {
  const auto deallocate = [](int columns, uint32_t offset, int warp) {
    return fault_of_allocation([=] {
      if (ptx::warp_index() == 0) ptx::tcgen05_alloc(byte(0), 64);
      ptx::sync_block();
      const ptx::TensorAddress address = ptx::ld_shared_b32(byte(0)) + offset;
      if (ptx::warp_index() == warp) ptx::tcgen05_dealloc(address, columns);
    });
  };
  EXPECT_EQ(deallocate(64, 0, 0), "");
  expect_contains(deallocate(32, 0, 0), "which were not allocated together");
  expect_contains(deallocate(64, 16, 0), "which were not allocated together");
  expect_contains(deallocate(64, 0, 1), "by warp 1 of columns that warp 0 has allocated");
  expect_contains(deallocate(64, 0, 2), "the block ended with 64 columns of tensor memory");
}

TEST(TensorMemoryFaults, DeallocationOfColumnsInUse) {
  const auto deallocate = [](bool fence) {
    return fault_of_allocation([fence] {
      if (ptx::warp_index() == 0) ptx::tcgen05_alloc(byte(0), 32);
      ptx::sync_block();
      if (ptx::warp_index() == 1) {
        store(0);
        ptx::tcgen05_wait_st();
        if (fence) ptx::tcgen05_fence_before();
      }
      ptx::sync_block();
      ptx::tcgen05_fence_after();
      if (ptx::warp_index() == 0) ptx::tcgen05_dealloc(ptx::ld_shared_b32(byte(0)), 32);
    });
  };
  EXPECT_EQ(deallocate(true), "");
  expect_contains(deallocate(false),
                  "race: tcgen05_dealloc of column 0, lanes 32 to 63, of tensor memory, which "
                  "warp 1 wrote with no tcgen05_fence_before by that warp between");
}

// --- accesses ------------------------------------------------------------------------------------

TEST(TensorMemoryFaults, ColumnsThatAreNotAllocated) {
  expect_contains(fault_of_allocation([] {
                    if (ptx::warp_index() != 0) return;
                    ptx::tcgen05_alloc(byte(0), 32);
                    ptx::sync_warp();
                    store(24);
                  }),
                  "tcgen05_st of columns 24 to 39 of tensor memory, which are not allocated");
  expect_contains(fault_of_allocation([] {
                    if (ptx::thread_index() == 0) ptx::st_shared_b32(byte(0), 0);
                    ptx::sync_block();
                    load(0);
                  }),
                  "tcgen05_ld of columns 0 to 15 of tensor memory, which are not allocated");
}

TEST(TensorMemoryFaults, LanesOfOtherWarps) {
  expect_contains(fault_of_accesses([] {
                    if (!in_warps(1, 2)) return;
                    const uint32_t d[16] = {};
                    ptx::tcgen05_st(tensor(), d);
                  }),
                  "tcgen05_st at lane 0 of tensor memory by warp 1, which can access lanes 32 to");
}

TEST(TensorMemoryFaults, DisagreeingLanes) {
  expect_contains(fault_of_accesses([] {
                    uint32_t d[16] = {};
                    ptx::tcgen05_st(own_lanes(ptx::lane_index() == 5 ? 16 : 0), d);
                  }),
                  "the lanes of a warp give different addresses to tcgen05_st");
  expect_contains(fault_of_accesses([] {
                    if (ptx::lane_index() == 5) return;
                    load(0);
                  }),
                  "lanes 0-4,6-31 tcgen05_ld; lanes 5 sync_block");
}

TEST(TensorMemoryFaults, UnwrittenColumns) {
  expect_contains(
      fault_of_accesses([] {
        if (!in_warps(0, 1)) return;
        store(0);
        ptx::tcgen05_wait_st();
        load(8);
      }),
      "tcgen05_ld of column 16, lanes 0 to 31, of tensor memory, which was not written");
}

TEST(TensorMemoryFaults, MissingWaits) {
  late_and_early([] {
    const auto access = [](auto body) {
      return fault_of_accesses([&] {
        if (in_warps(0, 4)) {
          store(0);
          body();
        }
      });
    };
    expect_contains(access([] { load(0); }),
                    "race: tcgen05_ld of column 0 of tensor memory, to which warp 0 stores with no "
                    "tcgen05_wait_st");
    expect_contains(access([] { store(0); }), "to which warp 0 stores with no tcgen05_wait_st");
    expect_contains(access([] {}), "to which warp 0 stores with no tcgen05_wait_st");
    expect_contains(access([] {
                      ptx::tcgen05_wait_st();
                      uint32_t d[16];
                      ptx::tcgen05_ld(d, own_lanes(0));
                      ptx::tcgen05_st(own_lanes(0), d);
                    }),
                    "race: tcgen05_st of column 0 of tensor memory, from which a warp loads with "
                    "no tcgen05_wait_ld");
  });
}

TEST(TensorMemoryFaults, ExitWithoutWait) {
  expect_contains(fault_of(1, 32, kBytes,
                           [] {
                             ptx::tcgen05_alloc(byte(0), 32);
                             ptx::sync_warp();
                             store(0);
                           }),
                  "the thread exits with no tcgen05_wait_st after tcgen05_st");
  expect_contains(fault_of(1, 32, kBytes,
                           [] {
                             ptx::tcgen05_alloc(byte(0), 32);
                             ptx::sync_warp();
                             store(0);
                             ptx::tcgen05_wait_st();
                             uint32_t d[16];
                             ptx::tcgen05_ld(d, own_lanes(0));
                           }),
                  "the thread exits with no tcgen05_wait_ld after tcgen05_ld");
}

// Warps 0 to 3 write, or read what they wrote before; then warps 4 to 7 read or write.
struct HandOver {
  bool wait = true, before = true, barrier = true, after = true;
  bool reads_first = false, writes_second = false;
};

std::string hand_over(const HandOver& h) {
  Flags flags;
  return fault_of_accesses([h, &flags] {
    if (in_warps(0, 4)) {
      store(0);
      if (h.wait) ptx::tcgen05_wait_st();
      if (h.reads_first) load(0);
      if (h.before) ptx::tcgen05_fence_before();
    }
    if (h.barrier) {
      ptx::sync_block();
    } else {
      flags.pass(in_warps(0, 4), in_warps(4, 8));
    }
    if (in_warps(4, 8)) {
      if (h.after) ptx::tcgen05_fence_after();
      if (h.writes_second) {
        store(0);
        ptx::tcgen05_wait_st();
      } else {
        load(0);
      }
    }
  });
}

TEST(TensorMemoryFaults, HandOverBetweenWarps) {
  late_and_early([] {
    for (const bool reads_first : {false, true}) {
      for (const bool writes_second : {false, true}) {
        const HandOver all{.reads_first = reads_first, .writes_second = writes_second};
        EXPECT_EQ(hand_over(all), "");
        HandOver one = all;
        one.before = false;
        expect_contains(hand_over(one), "with no tcgen05_fence_before by that warp between");
        one = all;
        one.after = false;
        expect_contains(hand_over(one), "with no tcgen05_fence_after behind the barrier between");
        one = all;
        one.barrier = false;
        expect_contains(hand_over(one), "with no barrier between");
        if (reads_first) continue;
        one = all;
        one.wait = false;
        expect_contains(hand_over(one), " stores with no tcgen05_wait_st");
      }
    }
  });
}

TEST(TensorMemoryFaults, WritesAfterReadsOfAnotherWarp) {
  const auto overwrite = [](bool fence) {
    return fault_of_accesses([fence] {
      if (in_warps(0, 4)) {
        store(0);
        ptx::tcgen05_wait_st();
      }
      sync_with_fences();
      if (in_warps(4, 8)) {
        load(0);
        if (fence) ptx::tcgen05_fence_before();
      }
      ptx::sync_block();
      ptx::tcgen05_fence_after();
      if (in_warps(0, 4)) {
        store(0);
        ptx::tcgen05_wait_st();
      }
    });
  };
  EXPECT_EQ(overwrite(true), "");
  expect_contains(overwrite(false),
                  "which warp 4 read with no tcgen05_fence_before by that warp between");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
