// Products of tcgen05.mma, fed by TMA, compared with plain loops.
#include <vector>

#include "base/half.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/tile/tcgen05_operands.h"
#include "emulator/tensor_test_support.h"
#include "emulator/test_matrix.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kM = 128;
constexpr int kK = 192;
constexpr int kStep = 64;  // k per stage of the ring
constexpr int kStages = 2;
constexpr int kProducerWarp = 4;
constexpr int kProductWarp = 5;
constexpr int kThreads = 192;  // warps 0 to 3 read the sums
constexpr int kOperandColumn = 256;

// d [kM, kN] = a b, or -a b. Transposed operands have m or n contiguous in memory.
template <class T, int kN, bool kTransA, bool kTransB, bool kATensor, bool kNegateA>
struct Gemm {
  template <int kRows, bool kTrans>
  using Tile = tile::SwizzledTile<kTrans ? kStep : kRows, kTrans ? kRows : kStep>;
  using A = Tile<kM, kTransA>;
  using B = Tile<kN, kTransB>;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kSharedBytes = kOperandsAt + kStages * kStageBytes;
  static constexpr uint32_t kKind =
      tile::tcgen05_kind({kM, kN, std::is_same_v<T, BFloat16>, kTransA, kTransB, kNegateA});

  const Matrix<T>& a;
  const TensorMap& map_a;
  const TensorMap& map_b;
  std::vector<float>& d;

  static A tile_a(int stage) { return {byte(kOperandsAt + stage * kStageBytes)}; }
  static B tile_b(int stage) { return {byte(kOperandsAt + stage * kStageBytes + A::kBytes)}; }
  static ptx::SharedAddress full(int stage) { return barrier(stage); }
  static ptx::SharedAddress empty(int stage) { return barrier(2 + stage); }
  static ptx::SharedAddress sums_full() { return barrier(4); }
  static ptx::SharedAddress operand_full() { return barrier(5); }

  void produce() const {
    if (ptx::lane_index() != 0) return;
    for (int step = 0; step < kK / kStep; ++step) {
      const int stage = step % kStages;
      if (step >= kStages) ptx::mbarrier_wait_parity(empty(stage), (step / kStages - 1) & 1);
      ptx::mbarrier_arrive_expect_tx(full(stage), kStageBytes);
      load_panels(tile_a(stage), map_a, kTransA, step * kStep, full(stage));
      load_panels(tile_b(stage), map_b, kTransB, step * kStep, full(stage));
    }
  }

  void multiply() const {
    if (ptx::lane_index() != 0) return;
    if (kATensor) {
      ptx::mbarrier_wait_parity(operand_full(), 0);
      ptx::tcgen05_fence_after();
    }
    for (int step = 0; step < kK / kStep; ++step) {
      const int stage = step % kStages;
      ptx::mbarrier_wait_parity(full(stage), step / kStages & 1);
      const uint64_t a_stage =
          tile::tcgen05_operand(kTransA ? tile_a(stage).by_rows() : tile_a(stage).by_columns());
      const uint64_t b_stage =
          tile::tcgen05_operand(kTransB ? tile_b(stage).by_rows() : tile_b(stage).by_columns());
      for (int k = 0; k < kStep / 16; ++k) {
        const uint64_t ak = a_stage + (kTransA ? A::row_step(k) : A::column_step(k));
        const uint64_t bk = b_stage + (kTransB ? B::row_step(k) : B::column_step(k));
        const bool add = step > 0 || k > 0;
        if (kATensor) {
          const int column = kOperandColumn + step * kStep / 2 + k * 8;
          ptx::tcgen05_mma_f16_tensor_a(tensor(), tensor() + static_cast<uint32_t>(column), bk,
                                        kKind, add);
        } else {
          ptx::tcgen05_mma_f16(tensor(), ak, bk, kKind, add);
        }
      }
      if (step + kStages < kK / kStep) ptx::tcgen05_commit(empty(stage));
    }
    ptx::tcgen05_commit(sums_full());
  }

  void write_operand() const {
    uint32_t pairs[16];
    for (int column = 0; column < kK / 2; column += 16) {
      for (int i = 0; i < 16; ++i) {
        const int k = 2 * (column + i);
        pairs[i] = a.bits(ptx::thread_index(), k) | a.bits(ptx::thread_index(), k + 1) << 16;
      }
      ptx::tcgen05_st(own_lanes(kOperandColumn + column), pairs);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before();
    ptx::mbarrier_arrive(operand_full());
  }

  void store() const {
    if (kATensor) write_operand();
    ptx::mbarrier_wait_parity(sums_full(), 0);
    ptx::tcgen05_fence_after();
    for (int column = 0; column < kN; column += 16) {
      uint32_t sums[16];
      ptx::tcgen05_ld(sums, own_lanes(column));
      ptx::tcgen05_wait_ld(sums);
      for (int i = 0; i < 16; ++i) {
        d[static_cast<size_t>(ptx::thread_index() * kN + column + i)] = float_of(sums[i]);
      }
    }
  }

  void operator()() const {
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_init(sums_full(), 1);
      ptx::mbarrier_init(operand_full(), kM);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    if (ptx::warp_index() == kProducerWarp) {
      produce();
    } else if (ptx::warp_index() == kProductWarp) {
      multiply();
    } else {
      store();
    }
  }
};

template <class T, int kN, bool kTransA, bool kTransB, bool kATensor, bool kNegateA = false>
void check_gemm() {
  using Kernel = Gemm<T, kN, kTransA, kTransB, kATensor, kNegateA>;
  const Matrix<T> a(kTransA ? kK : kM, kTransA ? kM : kK, 1);
  const Matrix<T> b(kTransB ? kK : kN, kTransB ? kN : kK, 2);
  const TensorMap map_a = a.map(kTransA ? kStep : kM);
  const TensorMap map_b = b.map(kTransB ? kStep : kN);
  const Environment strict("TILEWISE_EMULATOR_STRICT", "1");
  check_products(a, kTransA, b, kTransB, [&](std::vector<float>& d) {
    ASSERT_EQ(fault_with_tensor_memory(kThreads, Kernel::kSharedBytes, Kernel{a, map_a, map_b, d}),
              "");
    if (kNegateA) {
      for (float& x : d) x = -x;
    }
  });
  EXPECT_EQ(statistics().tensor_products, kK / 16);
  EXPECT_EQ(statistics().tensor_products_by_issue, 0);
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

TEST(Tcgen05, Columns16) { check_gemm<BFloat16, 16, false, false, false>(); }
TEST(Tcgen05, NegatedOperand) {
  check_gemm<BFloat16, 32, false, false, false, true>();
  check_gemm<Half, 32, false, true, true, true>();
}
TEST(Tcgen05, Columns64) { check_all_forms<Half, 64>(); }
TEST(Tcgen05, Columns96) { check_gemm<BFloat16, 96, false, false, true>(); }
TEST(Tcgen05, Columns128) { check_all_forms<BFloat16, 128>(); }
TEST(Tcgen05, Columns256) { check_all_forms<Half, 256>(); }

}  // namespace
}  // namespace tilewise::cuda::emulator
