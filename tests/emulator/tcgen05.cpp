#include "emulator/tcgen05.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "emulator/block.h"
#include "emulator/device.h"
#include "emulator/swizzled_operand.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kM = TensorMemory::kLanes;
constexpr int kMaxN = 256;
constexpr int kDepth = SwizzledOperand::kDepth;
constexpr int kChunkBytes = SwizzledOperand::kChunkBytes;
constexpr int kChunkElements = SwizzledOperand::kChunkElements;
constexpr const char* kWhat = "tcgen05.mma";

uint32_t field(uint64_t bits, int shift, int count) {
  return static_cast<uint32_t>(bits >> shift & ((uint64_t{1} << count) - 1));
}

// The instruction descriptor of kind::f16. PTX ISA 9.7.16.4.2.
struct Kind {
  int m, n;
  bool bf16, negate_a, trans_a, trans_b;

  explicit Kind(uint32_t bits)
      : m(static_cast<int>(field(bits, 24, 5)) * 16),
        n(static_cast<int>(field(bits, 17, 6)) * 8),
        bf16(field(bits, 7, 3) == 1),
        negate_a(field(bits, 13, 1) != 0),
        trans_a(field(bits, 15, 1) != 0),
        trans_b(field(bits, 16, 1) != 0) {
    constexpr uint32_t kFloat = 1;
    constexpr uint32_t kOtherFields = 7u << 29 | 1u << 23 | 1u << 14 | 1u << 6 | 15u;
    const uint32_t a = field(bits, 7, 3);
    const uint32_t b = field(bits, 10, 3);
    if (m != kM || n < 16 || n > kMaxN || n % 16 != 0 || field(bits, 4, 2) != kFloat || a > 1 ||
        a != b || (bits & kOtherFields) != 0) {
      fault(
          text("tcgen05.mma with the instruction descriptor %08x: only M = 128, N from 16 to 256 "
               "in steps of 16, fp16 or bf16 for both operands and fp32 sums are emulated",
               bits));
    }
  }
};

// PTX ISA 9.7.16.4.1.
SwizzledOperand operand(uint64_t descriptor) {
  constexpr uint32_t kSwizzle128 = 2;
  const bool emulated = field(descriptor, 61, 3) == kSwizzle128 && field(descriptor, 46, 3) == 1 &&
                        field(descriptor, 49, 12) == 0 && field(descriptor, 30, 2) == 0 &&
                        field(descriptor, 14, 2) == 0;
  if (!emulated) {
    fault(
        text("tcgen05.mma with the descriptor %016llx: only the 128-byte swizzle without base "
             "offset is emulated",
             static_cast<unsigned long long>(descriptor)));
  }
  return SwizzledOperand(descriptor);
}

template <class Visit>
void for_each_chunk(const TensorProduct& p, const Kind& kind, Visit visit) {
  if (!p.a_in_tensor) operand(p.a).for_each_chunk(kind.trans_a, 0, kind.m, visit);
  operand(p.b).for_each_chunk(kind.trans_b, 0, kind.n, visit);
}

template <size_t kRows>
using Matrix = std::array<std::array<float, kRows>, kDepth>;  // [k][row]

struct OperandPair {
  Matrix<kM> a;
  Matrix<kMaxN> b;
};

template <size_t kRows>
void read_operand(const SharedMemory& shared, const SwizzledOperand& operand, bool trans, int rows,
                  bool bf16, Matrix<kRows>& matrix) {
  operand.for_each_chunk(trans, 0, rows, [&](uint32_t address, int line, int chunk) {
    std::array<uint16_t, kChunkElements> bits;
    std::array<float, kChunkElements> values;
    std::memcpy(bits.data(), shared.at(address), kChunkBytes);
    unpack(bits.data(), kChunkElements, bf16, values.data());
    for (int i = 0; i < kChunkElements; ++i) {
      const int other = chunk * kChunkElements + i;
      const int k = trans ? line : other;
      matrix[static_cast<size_t>(k)][static_cast<size_t>(trans ? other : line)] =
          values[static_cast<size_t>(i)];
    }
  });
}

void read_operand(TensorMemory& memory, int column, bool bf16, Matrix<kM>& matrix) {
  for (int lane = 0; lane < kM; ++lane) {
    std::array<uint16_t, kDepth> bits;
    std::array<float, kDepth> values;
    std::memcpy(bits.data(), memory.at(lane, column), sizeof(bits));
    unpack(bits.data(), kDepth, bf16, values.data());
    for (size_t k = 0; k < kDepth; ++k) matrix[k][static_cast<size_t>(lane)] = values[k];
  }
}

// sums[j] += a[row][k] * b[k][j], one k after another; the products are exact.
void multiply_row(float* sums, const Matrix<kM>& a, int row, const Matrix<kMaxN>& b, int n) {
  for (size_t k = 0; k < kDepth; ++k) {
    const float x = a[k][static_cast<size_t>(row)];
    for (int j = 0; j < n; ++j) sums[j] += x * b[k][static_cast<size_t>(j)];
  }
}

int column_of(uint64_t address) { return static_cast<int>(field(address, 0, 16)); }

}  // namespace

void TensorCore::start(int rank) {
  rank_ = rank;
  queue_.clear();
}

void TensorCore::issue(const TensorProduct& p) {
  Block& b = block();
  const Kind kind(p.kind);
  if (p.a_in_tensor && kind.trans_a) {
    fault("tcgen05.mma with a transposed operand in tensor memory");
  }
  const uint32_t time = b.tick();
  b.tensor_memory().issue({.d = p.d,
                           .kind = p.kind,
                           .n = kind.n,
                           .add = p.add,
                           .a_in_tensor = p.a_in_tensor,
                           .a = p.a_in_tensor ? static_cast<uint32_t>(p.a) : 0},
                          time);
  const Moment moment = b.moment();
  for_each_chunk(p, kind, [&](uint32_t address, int, int) {
    b.shared().read_by_tensor_core(address, kWhat, Clocks::tensor_core(rank_), moment);
  });
  queue_.push_back({.commits = false, .product = p, .barrier = 0, .known = {}});
  if (!b.options().early_copies) return;
  run(queue_.front());
  queue_.pop_front();
}

void TensorCore::commit(uint32_t barrier) {
  Block& b = block();
  const int index = b.barriers().start_commit(barrier);
  b.tensor_memory().fence_before();
  Task task{.commits = true, .product = {}, .barrier = index, .known = b.clocks().nothing()};
  const uint32_t now = b.tick();
  b.clocks().release(b.thread(), now, b.moment().warp_barrier, task.known);
  b.clocks().note(task.known, Clocks::tensor_core(rank_), now);
  queue_.push_back(std::move(task));
  if (b.options().early_copies) land();
}

bool TensorCore::land() {
  const auto commits = [](const Task& task) { return task.commits; };
  if (std::none_of(queue_.begin(), queue_.end(), commits)) return false;
  for (bool arrived = false; !arrived;) {
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    run(task);
    arrived = task.commits;
  }
  return true;
}

void TensorCore::run(const Task& task) {
  if (task.commits) {
    block().state_of(rank_).barriers.finish_commit(task.barrier, task.known);
  } else {
    execute(task.product);
  }
}

void TensorCore::execute(const TensorProduct& p) {
  BlockState& state = block().state_of(rank_);
  const Kind kind(p.kind);
  // On the heap: a library that is loaded at run time has little space for thread-local variables.
  static thread_local const auto operands = std::make_unique<OperandPair>();
  auto& [a, b] = *operands;
  if (p.a_in_tensor) {
    read_operand(state.tensor_memory, column_of(p.a), kind.bf16, a);
  } else {
    read_operand(state.shared, operand(p.a), kind.trans_a, kind.m, kind.bf16, a);
  }
  if (kind.negate_a) {
    for (auto& column : a) {
      for (float& x : column) x = -x;
    }
  }
  read_operand(state.shared, operand(p.b), kind.trans_b, kind.n, kind.bf16, b);
  for (int row = 0; row < kM; ++row) {
    std::array<float, kMaxN> sums{};
    uint32_t* cells = state.tensor_memory.at(row, column_of(p.d));
    const size_t bytes = sizeof(float) * static_cast<size_t>(kind.n);
    if (p.add) std::memcpy(sums.data(), cells, bytes);
    multiply_row(sums.data(), a, row, b, kind.n);
    std::memcpy(cells, sums.data(), bytes);
  }
}

std::string TensorCore::unfinished() const {
  if (queue_.empty()) return "";
  return queue_.back().commits ? "the block ended before a tcgen05_commit arrived at its mbarrier"
                               : "the block ended while a tcgen05.mma was in flight";
}

// --- the instructions ----------------------------------------------------------------------------

void tcgen05_alloc(uint32_t result, int columns) {
  struct Call {
    uint32_t result;
    int columns;
  } call{result, columns};
  block().meet(Collective::tcgen05_alloc, call, [](std::array<Call*, kLanes>& calls) {
    Block& b = block();
    const uint32_t address = b.tensor_memory().alloc(calls[0]->columns);
    b.shared().write(calls[0]->result, &address, sizeof(address), "tcgen05_alloc", b.moment());
  });
}

void tcgen05_dealloc(uint32_t address, int columns) {
  struct Call {
    uint32_t address;
    int columns;
  } call{address, columns};
  block().meet(Collective::tcgen05_dealloc, call, [](std::array<Call*, kLanes>& calls) {
    block().tensor_memory().dealloc(calls[0]->address, calls[0]->columns);
  });
}

void tcgen05_relinquish_alloc_permit() {
  struct None {
  } call;
  block().meet(Collective::tcgen05_relinquish_alloc_permit, call,
               [](std::array<None*, kLanes>&) { block().tensor_memory().relinquish(); });
}

namespace {

template <class T>
struct TensorAccess {
  T* d;
  int n;
  uint32_t address;
};

// The registers of all lanes, which access the same columns.
template <class T>
TensorMemory::LaneRegisters<T> registers_of(const std::array<TensorAccess<T>*, kLanes>& calls,
                                            const char* what) {
  TensorMemory::LaneRegisters<T> d;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (calls[lane]->n != calls[0]->n || calls[lane]->address != calls[0]->address) {
      fault(text("the lanes of a warp give different addresses to %s", what));
    }
    d[lane] = calls[lane]->d;
  }
  return d;
}

}  // namespace

void tcgen05_ld(uint32_t* d, int n, uint32_t from) {
  using Call = TensorAccess<uint32_t>;
  Call call{d, n, from};
  block().meet(Collective::tcgen05_ld, call, [](std::array<Call*, kLanes>& calls) {
    block().tensor_memory().load(registers_of(calls, "tcgen05_ld"), calls[0]->n, calls[0]->address);
  });
}

void tcgen05_st(uint32_t to, const uint32_t* d, int n) {
  using Call = TensorAccess<const uint32_t>;
  Call call{d, n, to};
  block().meet(Collective::tcgen05_st, call, [](std::array<Call*, kLanes>& calls) {
    block().tensor_memory().store(registers_of(calls, "tcgen05_st"), calls[0]->n,
                                  calls[0]->address);
  });
}

void tcgen05_wait_ld() {
  struct None {
  } call;
  block().meet(Collective::tcgen05_wait_ld, call,
               [](std::array<None*, kLanes>&) { block().tensor_memory().wait_load(); });
}

void tcgen05_wait_st() {
  struct None {
  } call;
  block().meet(Collective::tcgen05_wait_st, call,
               [](std::array<None*, kLanes>&) { block().tensor_memory().wait_store(); });
}

void tcgen05_fence_before() { block().tensor_memory().fence_before(); }
void tcgen05_fence_after() { block().tensor_memory().fence_after(); }

void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, bool add) {
  block().tensor_core().issue({d, false, a, b, kind, add});
}

void tcgen05_mma_f16_tensor_a(uint32_t d, uint32_t a, uint64_t b, uint32_t kind, bool add) {
  block().tensor_core().issue({d, true, a, b, kind, add});
}

void tcgen05_commit(uint32_t barrier) { block().tensor_core().commit(barrier); }

}  // namespace tilewise::cuda::emulator
