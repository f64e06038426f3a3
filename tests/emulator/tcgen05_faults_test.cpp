// The faults of tcgen05.mma and tcgen05.commit that are detected.
#include "base/half.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/tile/tcgen05_operands.h"
#include "emulator/tensor_test_support.h"
#include "emulator/test_matrix.h"

namespace tilewise::cuda::emulator {
namespace {

// Two tiles of zeros in shared memory, written by all threads, and room for a third one.
using Square = tile::SwizzledTile<128, 64>;
constexpr int kFaultThreads = 160;  // warps 0 to 3 access the sums, warp 4 issues
constexpr int kFaultBytes = kOperandsAt + 3 * Square::kBytes;
constexpr uint32_t kKind = tile::tcgen05_kind({128, 64, true, false, false});
constexpr uint32_t kNarrowKind = tile::tcgen05_kind({128, 32, true, false, false});

Square square(int i) { return {byte(kOperandsAt + i * Square::kBytes)}; }
uint64_t operand(int i) { return tile::tcgen05_operand(square(i).by_columns()); }

void fill(int i, bool fence = true) {
  for (int chunk = ptx::thread_index(); chunk < 128 * 8; chunk += ptx::block_threads()) {
    ptx::st_shared_v4_b32(square(i).base + static_cast<uint32_t>(chunk * 16), {});
  }
  if (fence) ptx::fence_proxy_async();
}

template <class Body>
std::string fault_of_products(Body body) {
  return fault_with_tensor_memory(kFaultThreads, kFaultBytes, [&] {
    fill(0);
    fill(1);
    ptx::sync_block();
    body();
  });
}

bool issues() { return ptx::thread_index() == 128; }
bool accesses() { return ptx::thread_index() < 128; }

void multiply(int column = 0, bool add = false, uint32_t kind = kKind) {
  ptx::tcgen05_mma_f16(tensor() + static_cast<uint32_t>(column), operand(0), operand(1), kind, add);
}
void multiply_tensor(int column, int operand_column, bool add = false) {
  ptx::tcgen05_mma_f16_tensor_a(tensor() + static_cast<uint32_t>(column),
                                tensor() + static_cast<uint32_t>(operand_column), operand(1), kKind,
                                add);
}

// Commits and waits in the issuing thread.
void finish(int i = 0) {
  ptx::tcgen05_commit(barrier(i));
  ptx::mbarrier_wait_parity(barrier(i), 0);
  ptx::tcgen05_fence_after();
}

// Thread 0 does `next` after another thread has issued a product, and waits for it if `wait`.
template <class Next>
std::string fault_beside_product(bool wait, Next next) {
  return fault_of_products([wait, next] {
    if (issues()) {
      multiply();
      ptx::tcgen05_commit(barrier(0));
    }
    ptx::sync_block();
    if (ptx::thread_index() != 0) return;
    if (wait) ptx::mbarrier_wait_parity(barrier(0), 0);
    next();
  });
}

void store(int column) {
  const uint32_t d[16] = {};
  ptx::tcgen05_st(own_lanes(column), d);
}
void load(int column) {
  uint32_t d[16];
  ptx::tcgen05_ld(d, own_lanes(column));
  ptx::tcgen05_wait_ld(d);
}

std::string fault_of_issue(void (*body)()) {
  return fault_of_products([body] {
    if (!issues()) return;
    body();
    finish(3);
  });
}

TEST(Tcgen05Faults, Descriptors) {
  EXPECT_EQ(fault_of_issue([] { multiply(); }), "");
  expect_contains(
      fault_of_issue(
          [] { ptx::tcgen05_mma_f16(tensor(), square(0).by_columns(), operand(1), kKind, false); }),
      "only the 128-byte swizzle without base offset is emulated");
  expect_contains(fault_of_issue([] {
                    ptx::tcgen05_mma_f16(tensor(), operand(0), operand(1) | uint64_t{1} << 49,
                                         kKind, false);
                  }),
                  "only the 128-byte swizzle without base offset is emulated");
}

TEST(Tcgen05Faults, InstructionDescriptors) {
  const auto with_kind = [](uint32_t kind) {
    return fault_of_products([kind] {
      if (issues()) multiply(0, false, kind);
    });
  };
  const char* message = "only M = 128, N from 16 to 256 in steps of 16, fp16 or bf16";
  expect_contains(with_kind(tile::tcgen05_kind({64, 64, true, false, false})), message);
  expect_contains(with_kind(tile::tcgen05_kind({128, 8, true, false, false})), message);
  expect_contains(with_kind(tile::tcgen05_kind({128, 264, true, false, false})), message);
  expect_contains(with_kind(kKind & ~(1u << 4)), message);   // fp16 sums
  expect_contains(with_kind(kKind & ~(1u << 10)), message);  // fp16 times bf16
  expect_contains(with_kind(kKind | 1u << 14), message);     // b negated
  expect_contains(with_kind(kKind | 1u << 2), message);      // sparse
  expect_contains(fault_of_products([] {
                    if (!issues()) return;
                    ptx::tcgen05_mma_f16_tensor_a(tensor(), tensor() + 256, operand(1),
                                                  tile::tcgen05_kind({128, 64, true, true, false}),
                                                  false);
                  }),
                  "a transposed operand in tensor memory");
}

TEST(Tcgen05Faults, PlacesInTensorMemory) {
  expect_contains(fault_of_issue([] { multiply(480); }),
                  "tcgen05.mma of columns 480 to 543 of tensor memory, which are not allocated");
  expect_contains(fault_of_issue([] { multiply(32 << 16); }),
                  "tcgen05.mma at lane 32 of tensor memory");
  expect_contains(fault_of_issue([] { multiply_tensor(0, 508); }),
                  "tcgen05.mma of columns 508 to 515 of tensor memory, which are not allocated");
  expect_contains(fault_of_issue([] {
                    multiply();
                    finish();
                    multiply_tensor(32, 60);
                  }),
                  "an operand in column 60 of tensor memory, which it overwrites");
}

TEST(Tcgen05Faults, UnwrittenColumnsAndBytes) {
  expect_contains(fault_of_issue([] { multiply(0, true); }),
                  "tcgen05.mma adds to column 0 of tensor memory, which was not written");
  expect_contains(fault_of_issue([] { multiply_tensor(0, 256); }),
                  "an operand in column 256 of tensor memory, which was not written");
  expect_contains(
      fault_of_issue([] { ptx::tcgen05_mma_f16(tensor(), operand(2), operand(1), kKind, false); }),
      "tcgen05.mma of byte 33792 of shared memory, which was not written");
  expect_contains(
      fault_of_issue([] { ptx::tcgen05_mma_f16(tensor(), operand(3), operand(1), kKind, false); }),
      "the launch requested");
}

TEST(Tcgen05Faults, OperandsWithoutFence) {
  const auto write = [](bool fence) {
    return fault_of_products([fence] {
      fill(2, fence);
      ptx::sync_block();
      if (!issues()) return;
      ptx::tcgen05_mma_f16(tensor(), operand(2), operand(1), kKind, false);
      finish();
    });
  };
  EXPECT_EQ(write(true), "");
  expect_contains(write(false), "wrote with no fence_proxy_async before the barrier between");
}

TEST(Tcgen05Faults, WritesOfOperandsInUse) {
  late_and_early([] {
    const auto write = [](bool wait) {
      return fault_beside_product(wait, [] { ptx::st_shared_b32(square(1).base, 1); });
    };
    EXPECT_EQ(write(true), "");
    expect_contains(write(false),
                    "of byte 17408 of shared memory, which a tcgen05.mma reads whose "
                    "tcgen05.commit the thread has not waited for");
  });
}

// The producer loads bytes again that a product reads.
std::string load_again(bool wait_for_bytes, bool commits) {
  const Matrix<BFloat16> b(128, 64, 3);
  const TensorMap map = b.map(128);
  return fault_of_products([&, wait_for_bytes, commits] {
    const auto load_tile = [&] {
      ptx::mbarrier_arrive_expect_tx(barrier(0), Square::kBytes);
      ptx::cp_async_bulk_tensor_load(square(1).base, map, 0, 0, 0, 0, barrier(0),
                                     ptx::CachePolicy::evict_first);
    };
    if (ptx::thread_index() == 0) {
      load_tile();
      ptx::mbarrier_wait_parity(barrier(1), 0);
      load_tile();
      ptx::mbarrier_wait_parity(barrier(0), 1);
    }
    if (!issues()) return;
    if (wait_for_bytes) ptx::mbarrier_wait_parity(barrier(0), 0);
    multiply();
    commits ? ptx::tcgen05_commit(barrier(1)) : ptx::mbarrier_arrive(barrier(1));
    finish(2);
  });
}

TEST(Tcgen05Faults, LoadsOfOperandsInUse) {
  late_and_early([] {
    EXPECT_EQ(load_again(true, true), "");
    expect_contains(load_again(true, false),
                    "cp.async.bulk.tensor load of byte 17408 of shared memory, which a "
                    "tcgen05.mma reads whose tcgen05.commit");
    expect_contains(load_again(false, true), "of shared memory, wh");
  });
}

// Warp 4 multiplies, then warps 0 to 3 read the sums.
struct Reading {
  bool commits = true, waits = true, fence = true;
};

std::string read_sums(const Reading& r) {
  return fault_of_products([r] {
    if (issues()) {
      multiply();
      ptx::tcgen05_commit(r.commits ? barrier(0) : barrier(1));
      if (!r.commits) ptx::mbarrier_arrive(barrier(0));
    }
    if (!r.waits) ptx::sync_block();
    if (!accesses()) return;
    if (r.waits) ptx::mbarrier_wait_parity(barrier(0), 0);
    if (r.fence) ptx::tcgen05_fence_after();
    load(0);
  });
}

TEST(Tcgen05Faults, SumsReadTooEarly) {
  late_and_early([] {
    const std::string of = "of tensor memory, which a tcgen05.mma writes with no ";
    EXPECT_EQ(read_sums({}), "");
    expect_contains(read_sums({.commits = false}),
                    of + "wait for the mbarrier of its tcgen05_commit between");
    expect_contains(read_sums({.waits = false}),
                    of + "wait for the mbarrier of its tcgen05_commit between");
    expect_contains(read_sums({.fence = false}),
                    of + "tcgen05_fence_after behind the wait for its mbarrier between");
  });
}

// Warps 0 to 3 write an operand that warp 4 multiplies.
struct Writing {
  bool wait = true, before = true, arrive = true, after = true;
};

std::string multiply_written(const Writing& w) {
  Flags flags;
  return fault_of_products([w, &flags] {
    if (accesses()) {
      store(256);
      if (w.wait) ptx::tcgen05_wait_st();
      if (w.before) ptx::tcgen05_fence_before();
    }
    if (w.arrive) {
      ptx::sync_block();
    } else {
      flags.pass(accesses(), issues());
    }
    if (issues()) {
      if (w.after) ptx::tcgen05_fence_after();
      multiply_tensor(0, 256);
      finish();
    }
    if (!w.wait) ptx::tcgen05_wait_st();
  });
}

TEST(Tcgen05Faults, OperandsInTensorMemory) {
  late_and_early([] {
    EXPECT_EQ(multiply_written({}), "");
    expect_contains(multiply_written({.wait = false}),
                    "tcgen05.mma with an operand of column 256 of tensor memory, to which warp 0 "
                    "stores with no tcgen05_wait_st");
    expect_contains(multiply_written({.before = false}),
                    "which warp 0 wrote with no tcgen05_fence_before by that warp between");
    expect_contains(multiply_written({.arrive = false}),
                    "which warp 0 wrote with no barrier between");
    expect_contains(multiply_written({.after = false}),
                    "which warp 0 wrote with no tcgen05_fence_after behind the barrier between");
  });
}

// Warps 0 to 3 write to the columns of an operand that a product may still read.
TEST(Tcgen05Faults, OperandsOverwrittenByStores) {
  late_and_early([] {
    const auto overwrite = [](bool wait) {
      return fault_of_products([wait] {
        if (accesses()) {
          store(256);
          ptx::tcgen05_wait_st();
          ptx::tcgen05_fence_before();
        }
        ptx::sync_block();
        ptx::tcgen05_fence_after();
        if (issues()) {
          multiply_tensor(0, 256);
          ptx::tcgen05_commit(barrier(0));
        }
        if (wait) ptx::mbarrier_wait_parity(barrier(0), 0);
        if (!wait) ptx::sync_block();
        ptx::tcgen05_fence_after();
        if (!accesses()) return;
        store(256);
        ptx::tcgen05_wait_st();
      });
    };
    EXPECT_EQ(overwrite(true), "");
    expect_contains(
        overwrite(false),
        "of tensor memory, which a tcgen05.mma reads with no wait for the mbarrier of its "
        "tcgen05_commit between");
  });
}

TEST(Tcgen05Faults, SumsAreNoOperandOfAnUnfinishedProduct) {
  late_and_early([] {
    expect_contains(fault_of_issue([] {
                      multiply(0);
                      multiply_tensor(64, 0);
                    }),
                    "tcgen05.mma with an operand of column 0, lanes 0 to 31, of tensor memory, "
                    "which a tcgen05.mma writes with no wait");
    EXPECT_EQ(fault_of_issue([] {
                multiply(0);
                finish();
                multiply_tensor(64, 0);
              }),
              "");
  });
}

// Products of two threads have no order before the first one has been waited for.
TEST(Tcgen05Faults, ProductsOfTwoThreads) {
  late_and_early([] {
    const auto add = [](bool wait) {
      return fault_beside_product(wait, [] {
        ptx::tcgen05_fence_after();
        multiply(0, true);
        finish(1);
      });
    };
    EXPECT_EQ(add(true), "");
    expect_contains(add(false), "which a tcgen05.mma of another thread writes with no wait");
  });
}

// --- the order of issue --------------------------------------------------------------------------

std::string overwrite_operand(bool wait) {
  return fault_of_products([wait] {
    if (accesses()) {
      store(0);
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before();
    }
    ptx::sync_block();
    if (!issues()) return;
    ptx::tcgen05_fence_after();
    multiply_tensor(128, 0);
    if (wait) finish(0);
    multiply(0);
    finish(1);
  });
}

std::string other_shape(bool wait) {
  return fault_of_products([wait] {
    if (!issues()) return;
    multiply(0);
    if (wait) finish(0);
    multiply(0, true, kNarrowKind);
    finish(1);
  });
}

TEST(Tcgen05Strict, OrderThatTheIsaDoesNotPromise) {
  late_and_early([] {
    EXPECT_EQ(overwrite_operand(false), "");
    EXPECT_EQ(statistics().tensor_products_by_issue, 1);
    EXPECT_EQ(overwrite_operand(true), "");
    EXPECT_EQ(statistics().tensor_products_by_issue, 0);
    EXPECT_EQ(other_shape(false), "");
    EXPECT_EQ(statistics().tensor_products_by_issue, 1);
    const Environment strict("TILEWISE_EMULATOR_STRICT", "1");
    expect_contains(overwrite_operand(false),
                    "tcgen05.mma writes column 0 of tensor memory, which an unfinished product "
                    "reads as its operand: GPUs run them in the order of issue");
    expect_contains(other_shape(false),
                    "which an unfinished product of other sums or another shape writes");
    EXPECT_EQ(overwrite_operand(true), "");
    EXPECT_EQ(other_shape(true), "");
  });
}

// --- commits -------------------------------------------------------------------------------------

TEST(Tcgen05Faults, Commits) {
  late_and_early([] {
    expect_contains(fault_of_issue([] { ptx::tcgen05_commit(byte(512)); }),
                    "tcgen05.commit at byte 512 of shared memory, where no mbarrier was");
    expect_contains(fault_of_products([] {
                      if (issues()) {
                        ptx::mbarrier_init(byte(512), 1);
                        ptx::tcgen05_commit(byte(512));
                      }
                    }),
                    "tcgen05.commit signals it with no fence_mbarrier_init by thread 128");
  });
}

TEST(Tcgen05Faults, WorkInFlightAtTheEnd) {
  const auto end_with = [](bool commits) {
    return fault_of(1, 32, kFaultBytes, [commits] {
      if (ptx::thread_index() == 0) {
        ptx::mbarrier_init(barrier(0), 1);
        ptx::fence_mbarrier_init();
      }
      ptx::tcgen05_alloc(byte(0), 64);
      fill(0);
      fill(1);
      ptx::sync_block();
      if (ptx::thread_index() != 0) return;
      multiply();
      if (commits) ptx::tcgen05_commit(barrier(0));
    });
  };
  expect_contains(end_with(false), "the block ended while a tcgen05.mma was in flight");
  expect_contains(end_with(true),
                  "the block ended before a tcgen05_commit arrived at its mbarrier");
  const Environment early("TILEWISE_EMULATOR_COPIES", "early");
  expect_contains(end_with(true), "the block ended with 64 columns of tensor memory allocated");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
