// TMA copies compared with plain loops, and the faults that are detected.
#include <vector>

#include "base/half.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/tile/swizzled.h"
#include "emulator/bulk.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kColumns = 72, kRows = 11, kHeads = 3, kBatches = 2;
constexpr int kBoxRows = 16;
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kBarrier = 2 * kBoxBytes;  // after two boxes
constexpr int kBytes = kBarrier + 16;
using Box = tile::SwizzledTile<kBoxRows, 64>;

ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}

struct Tensor {
  std::vector<uint16_t> storage;
  uint16_t* data;
  // [batch, row, head, column] in memory, rows with a gap.
  static constexpr int kStrideHead = kColumns + 8, kStrideRow = kHeads * kStrideHead,
                       kStrideBatch = kRows * kStrideRow;

  Tensor() : storage(kBatches * kStrideBatch + 8) {
    for (size_t i = 0; i < storage.size(); ++i) storage[i] = static_cast<uint16_t>(i * 7 + 1);
    data = storage.data() + (16 - reinterpret_cast<uintptr_t>(storage.data()) % 16) % 16 / 2;
  }
  uint16_t* at(int column, int row, int head, int batch) const {
    const auto inside = [](int i, int size) { return i >= 0 && i < size; };
    if (!inside(column, kColumns) || !inside(row, kRows) || !inside(head, kHeads) ||
        !inside(batch, kBatches)) {
      return nullptr;
    }
    return data + batch * kStrideBatch + row * kStrideRow + head * kStrideHead + column;
  }
  TensorMapShape shape() const {
    return {.data = data,
            .columns = kColumns,
            .rows = kRows,
            .heads = kHeads,
            .batches = kBatches,
            .stride_row = kStrideRow,
            .stride_head = kStrideHead,
            .stride_batch = kStrideBatch,
            .dtype = 0,
            .box_rows = kBoxRows};
  }
  TensorMap map() const {
    TensorMap map;
    encode_tensor_map(map, shape());
    return map;
  }
};

void init(int arrivals = 1) {
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(byte(kBarrier), arrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
}

void load(const TensorMap& map, int to, int column, int row, int head, int batch) {
  ptx::cp_async_bulk_tensor_load(byte(to), map, column, row, head, batch, byte(kBarrier),
                                 ptx::CachePolicy::evict_first);
}

constexpr int kPlaces[][4] = {{0, 0, 0, 0},   {64, 0, 2, 1},   {0, 8, 1, 1},  {-3, -5, 1, 0},
                              {0, 40, 0, 0},  {0, 0, -1, 0},   {0, 0, 3, 0},  {0, 0, 0, 2},
                              {100, 0, 0, 0}, {-200, 2, 1, 0}, {8, 0, 0, -1}, {13, 3, 2, 1}};

TEST(Bulk, TensorLoads) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    for (const auto& [column, row, head, batch] : kPlaces) {
      run_grid(1, 32, kBytes, [&, c = column, r = row, h = head, s = batch] {
        init();
        if (ptx::lane_index() == 0) {
          ptx::mbarrier_arrive_expect_tx(byte(kBarrier), kBoxBytes);
          load(map, kBoxBytes, c, r, h, s);
        }
        ptx::mbarrier_wait_parity(byte(kBarrier), 0);
        for (int i = ptx::lane_index(); i < kBoxRows * 64; i += 32) {
          const int chunk = Box::chunk_offset(i / 64, i % 64 / 8);
          const uint32_t word = ptx::ld_shared_b32(byte(kBoxBytes + chunk + i % 8 / 2 * 4));
          const uint16_t* expected = tensor.at(c + i % 64, r + i / 64, h, s);
          ASSERT_EQ(word >> i % 2 * 16 & 0xffff, expected == nullptr ? 0 : *expected);
        }
      });
      EXPECT_EQ(statistics().bulk_bytes, kBoxBytes);
    }
  }
}

void fill(int from) {
  for (int i = ptx::lane_index(); i < kBoxRows * 8; i += 32) {
    const auto first = static_cast<uint32_t>(i * 8);
    uint32_t r[4];
    for (uint32_t pair = 0; pair < 4; ++pair) {
      r[pair] = (first + 2 * pair) | (first + 2 * pair + 1) << 16;
    }
    ptx::st_shared_v4_b32(byte(from + Box::chunk_offset(i / 8, i % 8)), r);
  }
}

TEST(Bulk, TensorStores) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    for (const auto& [column, row, head, batch] : kPlaces) {
      const Tensor tensor;
      std::vector<uint16_t> expected = tensor.storage;
      for (int i = 0; i < kBoxRows * 64; ++i) {
        const uint16_t* to = tensor.at(column + i % 64, row + i / 64, head, batch);
        if (to != nullptr) {
          expected[static_cast<size_t>(to - tensor.storage.data())] = static_cast<uint16_t>(i);
        }
      }
      const TensorMap map = tensor.map();
      run_grid(1, 32, kBytes, [&, c = column, r = row, h = head, s = batch] {
        fill(0);
        ptx::fence_proxy_async();
        ptx::sync_warp();
        if (ptx::lane_index() == 0) {
          ptx::cp_async_bulk_tensor_store(map, c, r, h, s, byte(0));
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
        }
      });
      EXPECT_EQ(tensor.storage, expected);
    }
  }
}

alignas(16) float global_sums[64];

TEST(Bulk, PlainLoadsAndReductions) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    for (int i = 0; i < 64; ++i) global_sums[i] = static_cast<float>(i);
    run_grid(3, 32, kBytes, [] {
      init();
      if (ptx::lane_index() == 0) {
        ptx::mbarrier_arrive_expect_tx(byte(kBarrier), 128);
        ptx::cp_async_bulk_load(byte(32), global_sums + 32, 128, byte(kBarrier));
        ptx::mbarrier_wait_parity(byte(kBarrier), 0);
        ptx::cp_reduce_async_bulk_add_f32(global_sums, byte(32), 64);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group<0>();
      }
    });
    for (int i = 0; i < 64; ++i) EXPECT_EQ(global_sums[i], i < 16 ? i + 3 * (i + 32) : i);
  }
}

TEST(Bulk, ReleaseWithUnfinishedStores) {
  const auto set = [](bool complete) {
    return fault_of(1, 32, kBytes, [complete] {
      fill(0);
      ptx::fence_proxy_async();
      ptx::sync_warp();
      if (ptx::lane_index() != 0) return;
      int32_t flag = 0;
      ptx::cp_reduce_async_bulk_add_f32(global_sums, byte(0), 16, ptx::CachePolicy::evict_last);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
      if (complete) ptx::cp_async_bulk_wait_group<0>();
      ptx::st_release(&flag, 1);
    });
  };
  EXPECT_EQ(set(true), "");
  expect_contains(set(false), "st_release while bulk copies of the thread may still be writing");
}

TEST(Bulk, RefusesInvalidTensorMaps) {
  const Tensor tensor;
  const auto refused = [&](auto change, const char* why) {
    TensorMapShape shape = tensor.shape();
    change(shape);
    TensorMap map;
    try {
      encode_tensor_map(map, shape);
      ADD_FAILURE() << "expected: " << why;
    } catch (const Fault& fault) {
      expect_contains(fault.what(), why);
    }
  };
  refused([&](TensorMapShape& s) { s.data = tensor.data + 4; }, "not a multiple of 16");
  refused([](TensorMapShape& s) { s.data = nullptr; }, "not a multiple of 16");
  refused([](TensorMapShape& s) { s.rows = 0; }, "size 0");
  refused([](TensorMapShape& s) { s.columns = (int64_t{1} << 32) + 1; }, "size 4294967297");
  refused([](TensorMapShape& s) { s.stride_row = 84; }, "a stride of 168 bytes");
  refused([](TensorMapShape& s) { s.stride_batch = int64_t{1} << 39; }, "below 2^40");
  refused([](TensorMapShape& s) { s.stride_head = -8; }, "a stride of -16 bytes");
  refused([](TensorMapShape& s) { s.box_rows = 257; }, "a box of 257 rows");
  TensorMapShape one_row = tensor.shape();
  one_row.rows = 1;
  one_row.stride_row = 3;
  TensorMap map;
  encode_tensor_map(map, one_row);
}

// A thread loads two boxes; then all threads of two warps run `then`.
template <class Then>
std::string fault_after_load(int expected, Then then) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  return fault_of(1, 64, kBytes, [&] {
    init();
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(byte(kBarrier), expected);
      load(map, 0, 0, 0, 0, 0);
      load(map, kBoxBytes, 0, 0, 1, 0);
    }
    ptx::sync_block();
    then(map);
  });
}

constexpr int kTwoBoxes = 2 * kBoxBytes;

TEST(Bulk, AccessWithoutWaiting) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    const auto wait = [] { ptx::mbarrier_wait_parity(byte(kBarrier), 0); };
    EXPECT_EQ(fault_after_load(kTwoBoxes,
                               [&](const TensorMap&) {
                                 wait();
                                 ptx::ld_shared_b32(byte(kBoxBytes));
                               }),
              "");
    // All threads except this one wait.
    const std::string read = fault_after_load(kTwoBoxes, [&](const TensorMap&) {
      if (ptx::thread_index() != 40) wait();
      ptx::ld_shared_b32(byte(kBoxBytes + 4));
    });
    expect_contains(read, "of byte 2052 of shared memory, ");
    expect_contains(fault_after_load(kTwoBoxes,
                                     [&](const TensorMap&) {
                                       if (ptx::thread_index() == 40)
                                         ptx::st_shared_b32(byte(0), ~0u);
                                       wait();
                                     }),
                    "of byte 0 of shared memory, ");
  }
  expect_contains(fault_after_load(kTwoBoxes, [](const TensorMap&) {}),
                  "the block ended while a copy to byte 0 of shared memory was in flight");
}

TEST(Bulk, AnnouncedBytes) {
  const auto wait = [](const TensorMap&) { ptx::mbarrier_wait_parity(byte(kBarrier), 0); };
  expect_contains(fault_after_load(kBoxBytes, wait),
                  "copies deliver 2048 bytes more than were expected");
  const std::string message = fault_after_load(kTwoBoxes + 16, wait);
  expect_contains(message, "deadlock");
  expect_contains(message, "(phase 0, 1 of 1 arrivals, 4112 bytes to come, 4096 in flight)");
}

TEST(Bulk, LoadsIntoBytesInUse) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  // Warp 1 has written or read the box, and warp 0 loads into it.
  const auto reuse = [&](bool write, bool fence, bool barrier) {
    return fault_of(1, 64, kBytes, [&] {
      init(2);
      if (ptx::thread_index() == 32) {
        if (write) {
          ptx::st_shared_b32(byte(64), 1);
        } else {
          ptx::cp_async_4(byte(64), global_sums, 4);
          ptx::cp_async_commit_group();
          ptx::cp_async_wait_group<0>();
          ptx::fence_proxy_async();
          ptx::ld_shared_b32(byte(64));
        }
        if (fence) ptx::fence_proxy_async();
        if (barrier) ptx::mbarrier_arrive(byte(kBarrier));
      }
      if (ptx::thread_index() == 0) {
        if (barrier) {
          ptx::mbarrier_arrive(byte(kBarrier));
          ptx::mbarrier_wait_parity(byte(kBarrier), 0);
        } else {
          ptx::mbarrier_arrive(byte(kBarrier));
        }
        ptx::mbarrier_arrive_expect_tx(byte(kBarrier), kBoxBytes);
        load(map, 0, 0, 0, 0, 0);
      }
    });
  };
  expect_contains(reuse(true, false, true), "with no fence_proxy_async before the barrier between");
  expect_contains(reuse(true, true, false), "race: cp.async.bulk.tensor load of byte 64");
  expect_contains(reuse(false, true, false), "race: cp.async.bulk.tensor load of byte 64");
  for (const bool write : {true, false}) {
    expect_contains(reuse(write, true, true), "the block ended while a copy");  // no earlier fault
  }
}

TEST(Bulk, BarrierInitialisedWithoutFence) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  const auto start = [&](bool fence) {
    return fault_of(1, 32, kBytes, [&] {
      if (ptx::thread_index() == 0) {
        ptx::mbarrier_init(byte(kBarrier), 1);
        if (fence) ptx::fence_mbarrier_init();
      }
      ptx::sync_block();
      if (ptx::thread_index() == 0) {
        ptx::mbarrier_arrive_expect_tx(byte(kBarrier), kBoxBytes);
        load(map, 0, 0, 0, 0, 0);
        ptx::mbarrier_wait_parity(byte(kBarrier), 0);
      }
    });
  };
  EXPECT_EQ(start(true), "");
  expect_contains(start(false), "with no fence_mbarrier_init by thread 0");
}

template <class Before, class After>
std::string fault_of_store(Before before, After after) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  return fault_of(1, 32, kBytes, [&] {
    fill(0);
    before();
    if (ptx::lane_index() == 31) {
      ptx::cp_async_bulk_tensor_store(map, 0, 0, 0, 0, byte(0));
      ptx::cp_async_bulk_commit_group();
    }
    after();
  });
}

TEST(Bulk, StoresOfBytesBeingWritten) {
  const auto fence_and_sync = [] {
    ptx::fence_proxy_async();
    ptx::sync_warp();
  };
  const auto wait = [] {
    if (ptx::lane_index() == 31) ptx::cp_async_bulk_wait_group_read<0>();
  };
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    EXPECT_EQ(fault_of_store(fence_and_sync, wait), "");
    expect_contains(fault_of_store([] { ptx::sync_warp(); }, wait), "with no fence_proxy_async");
    expect_contains(fault_of_store([] { ptx::fence_proxy_async(); }, wait), "race: cp.async.bulk");
    expect_contains(fault_of_store(
                        [] {
                          ptx::sync_warp();
                          ptx::fence_proxy_async();
                        },
                        wait),
                    "with no fence_proxy_async before the barrier");
    expect_contains(fault_of_store(fence_and_sync, [] {}),
                    "exits while cp.async.bulk.tensor store");
    expect_contains(fault_of_store(fence_and_sync,
                                   [&] {
                                     ptx::sync_warp();
                                     if (ptx::lane_index() == 5) ptx::st_shared_b32(byte(64), 1);
                                     ptx::sync_warp();
                                     wait();
                                   }),
                    "which an unfinished wgmma or bulk copy reads");
    expect_contains(fault_of_store(fence_and_sync,
                                   [&] {
                                     ptx::shuffle(1.0f, 0);
                                     wait();
                                     ptx::shuffle(1.0f, 0);
                                     if (ptx::lane_index() == 5) ptx::st_shared_b32(byte(64), 1);
                                   }),
                    "race: st.shared of byte 64 of shared memory, which thread 31 read");
    EXPECT_EQ(fault_of_store(fence_and_sync,
                             [&] {
                               wait();
                               ptx::sync_warp();
                               if (ptx::lane_index() == 5) ptx::st_shared_b32(byte(64), 1);
                             }),
              "");
  }
  expect_contains(fault_of(1, 32, kBytes,
                           [] {
                             ptx::fence_proxy_async();
                             ptx::cp_reduce_async_bulk_add_f32(global_sums, byte(0), 16);
                           }),
                  "cp.reduce.async.bulk of byte 0 of shared memory, which was not written");
}

TEST(Bulk, Misaligned) {
  const Tensor tensor;
  const TensorMap map = tensor.map();
  const TensorMap none;
  const auto start = [&](auto copy) {
    return fault_of(1, 32, kBytes, [&] {
      init(32);
      copy();
    });
  };
  expect_contains(start([&] { load(map, 64, 0, 0, 0, 0); }), "not 128-byte aligned");
  expect_contains(start([&] { load(none, 0, 0, 0, 0, 0); }), "no tensor map");
  expect_contains(start([&] { load(map, 3 * kBoxBytes, 0, 0, 0, 0); }), "the launch requested");
  expect_contains(
      start([&] { ptx::cp_async_bulk_load(byte(0), global_sums + 1, 16, byte(kBarrier)); }),
      "multiples of 16");
  expect_contains(start([&] { ptx::cp_async_bulk_load(byte(0), global_sums, 8, byte(kBarrier)); }),
                  "multiples of 16");
  expect_contains(start([&] { ptx::cp_reduce_async_bulk_add_f32(global_sums, byte(8), 16); }),
                  "multiples of 16");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
