// Products of warpgroups, fed by TMA, compared with plain loops; and the faults that are detected.
#include <vector>

#include "base/float8.h"
#include "base/half.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wgmma_float8.h"
#include "cuda/tile/swizzled.h"
#include "emulator/test_matrix.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kM = 128;  // two warpgroups
// k, and k per stage of the ring, in units of 16 bits.
constexpr int kK = 192;
constexpr int kStep = 64;
constexpr int kStages = 2;
constexpr int kMathThreads = 256;

template <class T>
constexpr ptx::Half16 kHalf = std::is_same_v<T, BFloat16> ? ptx::Half16::bf16 : ptx::Half16::f16;

template <class T, int kN>
struct ProductOf : ptx::Wgmma<kN, kHalf<T>> {};
template <int kN>
struct ProductOf<Float8, kN> {
  template <bool kTransA, bool kTransB, class... Operands>
  static void start(float (&d)[kN / 2], const Operands&... operands) {
    static_assert(!kTransA && !kTransB);
    ptx::WgmmaFloat8<kN>::start(d, operands...);
  }
  template <bool kTransA, bool kTransB, class... Operands>
  static void add(float (&d)[kN / 2], const Operands&... operands) {
    static_assert(!kTransA && !kTransB);
    ptx::WgmmaFloat8<kN>::add(d, operands...);
  }
  template <bool kTransB>
  static void start(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
    start<false, kTransB, uint32_t[4], uint64_t>(d, a, b);
  }
  template <bool kTransB>
  static void add(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
    add<false, kTransB, uint32_t[4], uint64_t>(d, a, b);
  }
};

// d [kM, kN] = a b. Transposed operands have m or n contiguous in memory.
template <class T, int kN, bool kTransA, bool kTransB, bool kARegisters>
struct Gemm {
  // A stage of an operand with `kRows` of m or n.
  template <int kRows, bool kTrans>
  using Tile = tile::SwizzledTile<kTrans ? kStep : kRows, kTrans ? kRows : kStep>;
  using A = Tile<kM, kTransA>;
  using B = Tile<kN, kTransB>;
  using Product = ProductOf<T, kN>;
  static constexpr int kStepElements = kStep * 2 / static_cast<int>(sizeof(T));
  static constexpr int kSharedBytes = kStages * (A::kBytes + B::kBytes) + 2 * kStages * 8;

  const TensorMap& map_a;
  const TensorMap& map_b;
  std::vector<float>& d;

  static ptx::SharedAddress base() { return ptx::shared_address(ptx::shared_memory()); }
  static A tile_a(int stage) { return {base() + static_cast<uint32_t>(stage * A::kBytes)}; }
  static B tile_b(int stage) {
    return {base() + static_cast<uint32_t>(kStages * A::kBytes + stage * B::kBytes)};
  }
  static ptx::SharedAddress full(int stage) {
    return base() + static_cast<uint32_t>(kStages * (A::kBytes + B::kBytes) + stage * 16);
  }
  static ptx::SharedAddress empty(int stage) { return full(stage) + 8; }

  void produce() const {
    if (ptx::thread_index() != kMathThreads) return;
    for (int step = 0; step < kK / kStep; ++step) {
      const int stage = step % kStages;
      if (step >= kStages) ptx::mbarrier_wait_parity(empty(stage), (step / kStages - 1) & 1);
      ptx::mbarrier_arrive_expect_tx(full(stage), A::kBytes + B::kBytes);
      load_panels(tile_a(stage), map_a, kTransA, step * kStepElements, full(stage));
      load_panels(tile_b(stage), map_b, kTransB, step * kStepElements, full(stage));
    }
  }

  // The fragment of mma.m16n8k16 for 16 columns from `k` on.
  static void load_fragment(uint32_t (&a)[4], const A& tile, int row0, int k) {
    const int lane = ptx::lane_index();
    const int row = row0 + lane % 16;
    ptx::ldmatrix_x4(a, tile.base + static_cast<uint32_t>(A::chunk_offset(row, k * 2 + lane / 16)));
  }

  void multiply() const {
    const int group = ptx::warp_index() / 4;
    const int row0 = ptx::warp_index() * 16;
    float sums[kN / 2];
    for (int step = 0; step < kK / kStep; ++step) {
      const int stage = step % kStages;
      ptx::mbarrier_wait_parity(full(stage), step / kStages & 1);
      uint32_t fragments[kStep / 16][4];
      if constexpr (kARegisters) {
        for (int k = 0; k < kStep / 16; ++k) load_fragment(fragments[k], tile_a(stage), row0, k);
      }
      const uint64_t a =
          kTransA ? tile_a(stage).by_rows(group) : tile_a(stage).by_columns(group * 64);
      const uint64_t b = kTransB ? tile_b(stage).by_rows() : tile_b(stage).by_columns();
      ptx::wgmma_fence();
      for (int k = 0; k < kStep / 16; ++k) {
        const uint64_t bk = b + (kTransB ? B::row_step(k) : B::column_step(k));
        const uint64_t ak = a + (kTransA ? A::row_step(k) : A::column_step(k));
        const bool start = step == 0 && k == 0;
        if constexpr (kARegisters) {
          start ? Product::template start<kTransB>(sums, fragments[k], bk)
                : Product::template add<kTransB>(sums, fragments[k], bk);
        } else {
          start ? Product::template start<kTransA, kTransB>(sums, ak, bk)
                : Product::template add<kTransA, kTransB>(sums, ak, bk);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::mbarrier_arrive(empty(stage));
    }
    const int lane = ptx::lane_index();
    for (int i = 0; i < kN / 2; ++i) {
      const int row = row0 + lane / 4 + i % 4 / 2 * 8;
      d[static_cast<size_t>(row * kN + i / 4 * 8 + lane % 4 * 2 + i % 2)] = sums[i];
    }
  }

  void operator()() const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full(stage), 1);
        ptx::mbarrier_init(empty(stage), kMathThreads);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    if (ptx::thread_index() >= kMathThreads) {
      produce();
    } else {
      multiply();
    }
  }
};

template <class T, int kN, bool kTransA, bool kTransB, bool kARegisters>
void check_gemm() {
  using Kernel = Gemm<T, kN, kTransA, kTransB, kARegisters>;
  constexpr int kDepth = kK * 2 / static_cast<int>(sizeof(T));
  const Matrix<T> a(kTransA ? kDepth : kM, kTransA ? kM : kDepth, 1);
  const Matrix<T> b(kTransB ? kDepth : kN, kTransB ? kN : kDepth, 2);
  const TensorMap map_a = a.map(kTransA ? kStep : kM);
  const TensorMap map_b = b.map(kTransB ? kStep : kN);
  check_products(a, kTransA, b, kTransB, [&](std::vector<float>& d) {
    run_grid(1, kMathThreads + 128, Kernel::kSharedBytes, Kernel{map_a, map_b, d});
  });
  EXPECT_EQ(statistics().warpgroup_products, 8 * kK / 16);
}

template <class T, int kN>
void check_all_forms() {
  check_gemm<T, kN, false, false, false>();
  check_gemm<T, kN, false, true, false>();
  check_gemm<T, kN, true, false, false>();
  check_gemm<T, kN, true, true, false>();
  check_gemm<T, kN, false, false, true>();
  check_gemm<T, kN, false, true, true>();
}

TEST(Wgmma, Columns32) { check_all_forms<BFloat16, 32>(); }
TEST(Wgmma, Columns64) { check_all_forms<Half, 64>(); }
TEST(Wgmma, Columns80) { check_all_forms<BFloat16, 80>(); }
TEST(Wgmma, Columns96) { check_all_forms<Half, 96>(); }
TEST(Wgmma, Columns128) { check_all_forms<BFloat16, 128>(); }
TEST(Wgmma, Columns192) { check_all_forms<Half, 192>(); }
TEST(Wgmma, Columns256) { check_all_forms<BFloat16, 256>(); }

TEST(Wgmma, Float8) {
  check_gemm<Float8, 64, false, false, false>();
  check_gemm<Float8, 64, false, false, true>();
  check_gemm<Float8, 128, false, false, false>();
  check_gemm<Float8, 128, false, false, true>();
}

// --- detected faults -----------------------------------------------------------------------------

// Two tiles of zeros, written by a warpgroup, followed by a spare tile and an mbarrier.
using Square = tile::SwizzledTile<64, 64>;
constexpr int kBarrier = 3 * Square::kBytes;
constexpr int kFaultBytes = kBarrier + 16;
using Product = ptx::Wgmma<64, ptx::Half16::bf16>;

ptx::SharedAddress byte(int i) {
  return ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>(i);
}
Square square(int i) { return {byte(i * Square::kBytes)}; }

void fill(int i, bool fence = true) {
  for (int chunk = ptx::thread_index(); chunk < 64 * 8; chunk += ptx::block_threads()) {
    ptx::st_shared_v4_b32(square(i).base + static_cast<uint32_t>(chunk * 16), {});
  }
  if (fence) ptx::fence_proxy_async();
}

void multiply(float (&d)[32], uint64_t a = square(0).by_columns(),
              uint64_t b = square(1).by_columns()) {
  ptx::wgmma_fence();
  Product::start<false, false>(d, a, b);
}

template <class Body>
std::string fault_of_products(Body body, int threads = 128) {
  return fault_of(1, threads, kFaultBytes, [&] {
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_init(byte(kBarrier), 1);
      ptx::mbarrier_init(byte(kBarrier + 8), 128);
      ptx::fence_mbarrier_init();
    }
    fill(0);
    fill(1);
    ptx::sync_block();
    float d[32];
    body(d);
  });
}

void finish() {
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

TEST(WgmmaFaults, NoneInACorrectKernel) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    EXPECT_EQ(fault_of_products([](float (&d)[32]) {
                multiply(d);
                ptx::wgmma_commit_group();
                float e[32];
                multiply(e);
                ptx::wgmma_commit_group();
                ASSERT_TRUE(std::isnan(d[3]));
                ptx::wgmma_wait_group<1>();
                ASSERT_EQ(d[3], 0.0f);
                ASSERT_TRUE(std::isnan(e[3]));  // it must not be read before the wait
                ptx::wgmma_wait_group<0>();
                ASSERT_EQ(e[3], 0.0f);
              }),
              "");
  }
}

TEST(WgmmaFaults, UnwrittenOperands) {
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(2).by_columns());
                    finish();
                  }),
                  "of shared memory, which was not written");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(0).by_columns(), square(3).by_columns());
                    finish();
                  }),
                  "of shared memory, where an mbarrier is");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(0).by_columns(), square(4).by_columns());
                    finish();
                  }),
                  "the launch requested");
}

TEST(WgmmaFaults, OperandsWithoutFence) {
  const auto write = [](bool fence) {
    return fault_of_products([fence](float (&d)[32]) {
      fill(2, fence);
      ptx::sync_block();
      multiply(d, square(2).by_columns());
      finish();
    });
  };
  EXPECT_EQ(write(true), "");
  expect_contains(write(false), "wrote with no fence_proxy_async before the barrier between");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    fill(2, false);
                    ptx::sync_block();
                    ptx::fence_proxy_async();  // too late
                    multiply(d, square(2).by_columns());
                    finish();
                  }),
                  "with no fence_proxy_async before the barrier");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    fill(2);
                    ptx::sync_warp();  // does not order the rows of other warps
                    multiply(d, square(2).by_columns());
                    finish();
                  }),
                  "of shared memory, ");
}

TEST(WgmmaFaults, WritesOfOperandsInUse) {
  for (const char* copies : {"late", "early"}) {
    const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
    const auto write = [](bool wait) {
      return fault_of_products([wait](float (&d)[32]) {
        multiply(d);
        ptx::wgmma_commit_group();
        if (wait) ptx::wgmma_wait_group<0>();
        ptx::sync_block();
        fill(1);
        ptx::wgmma_wait_group<0>();
      });
    };
    EXPECT_EQ(write(true), "");
    expect_contains(write(false), "of shared memory, which an unfinished wgmma or bulk copy reads");
    // Only the warp of the writing thread has waited.
    expect_contains(fault_of_products([](float (&d)[32]) {
                      multiply(d);
                      finish();
                      if (ptx::warp_index() != 2) return;
                      ptx::shuffle(1.0f, 0);
                      ptx::st_shared_b32(square(1).base, 1);
                    }),
                    "of byte 8192 of shared memory, which a wgmma");
  }
}

// The products read bytes that a second warpgroup loads again as soon as it is signalled.
std::string load_again(bool wait_for_products, bool wait_for_bytes, bool arrive) {
  const Matrix<BFloat16> b(64, 64, 3);
  const TensorMap map = b.map(64);
  return fault_of_products(
      [&](float (&d)[32]) {
        const auto load = [&] {
          ptx::mbarrier_arrive_expect_tx(byte(kBarrier), Square::kBytes);
          ptx::cp_async_bulk_tensor_load(square(1).base, map, 0, 0, 0, 0, byte(kBarrier),
                                         ptx::CachePolicy::evict_first);
        };
        if (ptx::thread_index() >= 128) {
          if (ptx::thread_index() != 128) return;
          load();
          if (arrive) ptx::mbarrier_wait_parity(byte(kBarrier + 8), 0);
          if (!arrive) ptx::mbarrier_wait_parity(byte(kBarrier), 0);
          load();
          ptx::mbarrier_wait_parity(byte(kBarrier), 1);
          return;
        }
        if (wait_for_bytes) ptx::mbarrier_wait_parity(byte(kBarrier), 0);
        multiply(d);
        ptx::wgmma_commit_group();
        if (wait_for_products) ptx::wgmma_wait_group<0>();
        ptx::mbarrier_arrive(byte(kBarrier + 8));
        ptx::wgmma_wait_group<0>();
      },
      256);
}

TEST(WgmmaFaults, LoadsOfOperandsInUse) {
  for (const char* copies : {"late", "early"}) {
    for (const char* order : {"forward", "reverse"}) {
      const Environment copies_variable("TILEWISE_EMULATOR_COPIES", copies);
      const Environment order_variable("TILEWISE_EMULATOR_ORDER", order);
      EXPECT_EQ(load_again(true, true, true), "");
      EXPECT_NE(load_again(true, true, false), "");
      expect_contains(load_again(false, true, true),
                      "cp.async.bulk.tensor load of byte 8192 of shared memory, which a wgmma");
      expect_contains(load_again(true, false, true), "of shared memory, wh");
    }
  }
}

TEST(WgmmaFaults, UnfinishedGroups) {
  expect_contains(fault_of_products([](float (&d)[32]) { multiply(d); }),
                  "exits while a wgmma of its warp is in flight");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d);
                    ptx::wgmma_wait_group<0>();  // not committed
                  }),
                  "exits while a wgmma of its warp is in flight");
}

TEST(WgmmaFaults, SumsWrittenWithoutFence) {
  const auto add = [](bool change, bool fence) {
    return fault_of_products([change, fence](float (&d)[32]) {
      multiply(d);
      finish();
      if (change) d[5] += 1.0f;
      if (fence) ptx::wgmma_fence();
      Product::add<false, false>(d, square(0).by_columns(), square(1).by_columns());
      finish();
      ASSERT_EQ(d[5], change ? 1.0f : 0.0f);
    });
  };
  EXPECT_EQ(add(false, false), "");
  EXPECT_EQ(add(true, true), "");
  expect_contains(add(true, false), "registers that were written with no wgmma_fence between");
}

TEST(WgmmaFaults, DisagreeingThreads) {
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(ptx::lane_index() == 3 ? 1 : 0).by_columns());
                    finish();
                  }),
                  "the lanes of a warp start different wgmmas");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(ptx::warp_index() == 3 ? 1 : 0).by_columns());
                    finish();
                  }),
                  "the warps of a warpgroup start different wgmmas");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    if (ptx::lane_index() != 7) multiply(d);
                    finish();
                  }),
                  "different groups of wgmmas");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    if (ptx::warp_index() != 1) multiply(d);
                    finish();
                  }),
                  "warp 0 started 1 wgmmas, warp 1 of its warpgroup 0");
  expect_contains(fault_of_products([](float (&d)[32]) {
                    float e[32];
                    multiply(d);
                    if (ptx::lane_index() == 4) {
                      Product::add<false, false>(e, square(0).by_columns(), square(1).by_columns());
                    } else {
                      Product::add<false, false>(d, square(0).by_columns(), square(1).by_columns());
                    }
                    finish();
                  }),
                  "the lanes of a warp give different registers");
}

TEST(WgmmaFaults, Descriptors) {
  expect_contains(fault_of_products([](float (&d)[32]) {
                    multiply(d, square(0).by_columns() & ~tile::Operand::kSwizzle128);
                    finish();
                  }),
                  "only the 128-byte swizzle");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
