// Products of warpgroups, fed by TMA, against plain loops; and what is found wrong with them.
#include <cmath>
#include <random>
#include <vector>

#include "base/half.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/swizzled.h"
#include "emulator/bulk.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kM = 128;  // two warpgroups
constexpr int kK = 192;
constexpr int kStep = 64;  // of k, a stage of the ring
constexpr int kStages = 2;
constexpr int kMathThreads = 256;

template <class T>
struct Matrix {
  int rows, columns;
  std::vector<T> values;

  Matrix(int r, int c, int seed) : rows(r), columns(c), values(static_cast<size_t>(r * c)) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal;
    for (T& x : values) x = from_float<T>(normal(random));
  }
  float at(int r, int c) const { return to_float(values[static_cast<size_t>(r * columns + c)]); }
  TensorMap map(int box_rows) const {
    TensorMap map;
    encode_tensor_map(map, {.data = values.data(),
                            .columns = columns,
                            .rows = rows,
                            .heads = 1,
                            .slots = 1,
                            .stride_row = columns,
                            .stride_head = 0,
                            .stride_slot = 0,
                            .dtype = 0,
                            .box_rows = box_rows});
    return map;
  }
};

template <class T>
constexpr ptx::Half16 kHalf = std::is_same_v<T, BFloat16> ? ptx::Half16::bf16 : ptx::Half16::f16;

// d [kM, kN] = a b. Operands that are transposed lie in memory with m or n contiguous.
template <class T, int kN, bool kTransA, bool kTransB, bool kARegisters>
struct Gemm {
  // A stage of an operand with `kRows` of m or n.
  template <int kRows, bool kTrans>
  using Tile = tile::SwizzledTile<kTrans ? kStep : kRows, kTrans ? kRows : kStep>;
  using A = Tile<kM, kTransA>;
  using B = Tile<kN, kTransB>;
  using Product = ptx::Wgmma<kN, kHalf<T>>;
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

  template <class Tile_>
  static void load(const Tile_& to, const TensorMap& map, bool trans, int k, int stage) {
    for (int panel = 0; panel < Tile_::kPanels; ++panel) {
      ptx::cp_async_bulk_tensor_load(to.base + static_cast<uint32_t>(panel * Tile_::kPanelBytes),
                                     map, trans ? panel * 64 : k, trans ? k : 0, 0, 0, full(stage),
                                     ptx::CachePolicy::evict_last);
    }
  }

  void produce() const {
    if (ptx::thread_index() != kMathThreads) return;
    for (int step = 0; step < kK / kStep; ++step) {
      const int stage = step % kStages;
      if (step >= kStages) ptx::mbarrier_wait_parity(empty(stage), (step / kStages - 1) & 1);
      ptx::mbarrier_arrive_expect_tx(full(stage), A::kBytes + B::kBytes);
      load(tile_a(stage), map_a, kTransA, step * kStep, stage);
      load(tile_b(stage), map_b, kTransB, step * kStep, stage);
    }
  }

  // The fragment of mma.m16n8k16, 16 columns from `k` on.
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
  const Matrix<T> a(kTransA ? kK : kM, kTransA ? kM : kK, 1);
  const Matrix<T> b(kTransB ? kK : kN, kTransB ? kN : kK, 2);
  const TensorMap map_a = a.map(kTransA ? kStep : kM);
  const TensorMap map_b = b.map(kTransB ? kStep : kN);
  for (const char* copies : {"late", "early"}) {
    for (const char* order : {"forward", "reverse", "shuffled"}) {
      const Environment when("TILEWISE_EMULATOR_COPIES", copies);
      const Environment who("TILEWISE_EMULATOR_ORDER", order);
      std::vector<float> d(kM * kN, std::nanf(""));
      run_grid(1, kMathThreads + 128, Kernel::kSharedBytes, Kernel{map_a, map_b, d});
      for (int i = 0; i < kM; ++i) {
        for (int j = 0; j < kN; ++j) {
          double sum = 0;
          for (int k = 0; k < kK; ++k) {
            sum += static_cast<double>(kTransA ? a.at(k, i) : a.at(i, k)) *
                   (kTransB ? b.at(k, j) : b.at(j, k));
          }
          ASSERT_NEAR(d[static_cast<size_t>(i * kN + j)], sum, 1e-4) << i << " " << j;
        }
      }
    }
  }
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

}  // namespace
}  // namespace tilewise::cuda::emulator
