#include "emulator/wgmma.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulator/block.h"
#include "emulator/device.h"
#include "emulator/swizzled_operand.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kChunkBytes = SwizzledOperand::kChunkBytes;
constexpr int kChunkElements = SwizzledOperand::kChunkElements;
constexpr int kGroupWarps = 4;

SwizzledOperand operand(uint64_t descriptor) {
  constexpr uint64_t kSwizzle128 = 1;
  if (descriptor >> 62 != kSwizzle128 || (descriptor >> 49 & 7) != 0) {
    fault(
        text("wgmma with the descriptor %016llx: only the 128-byte swizzle without base offset "
             "is emulated",
             static_cast<unsigned long long>(descriptor)));
  }
  return SwizzledOperand(descriptor);
}

int warp_of_group() { return block().warp_of_block() % kGroupWarps; }

template <class Visit>
void for_each_chunk(const Operands& o, Visit visit) {
  if (!o.a_in_registers) {
    operand(o.a).for_each_chunk(o.trans_a, warp_of_group() * Products::kRows, Products::kRows,
                                visit);
  }
  operand(o.b).for_each_chunk(o.trans_b, 0, o.n, visit);
}

void unpack(const uint16_t* bits, int count, OperandType type, float* values) {
  if (type == OperandType::float8)
    unpack_float8(bits, count, values);
  else
    emulator::unpack(bits, count, type == OperandType::bf16, values);
}

// An operand converted to floats, [k][row].
struct Matrix {
  Operands operands{};
  uint16_t bits[Products::kMaxColumns * Products::kDepth];
  alignas(64) float values[Products::kMaxDepth][Products::kMaxColumns];

  // Whether its bits are read by the descriptor and in the type of operand b of `o`.
  bool is_b_of(const Operands& o) const {
    return operands.b == o.b && operands.n == o.n && operands.trans_b == o.trans_b &&
           operands.type == o.type;
  }
};

void decode(Matrix& m) {
  float line[Products::kMaxDepth * Products::kMaxColumns];
  const int rows = m.operands.n;
  const int depth = m.operands.depth();
  unpack(m.bits, rows * Products::kDepth, m.operands.type, line);
  for (int k = 0; k < depth; ++k) {
    if (m.operands.trans_b) {
      std::copy_n(line + k * rows, rows, m.values[k]);
    } else {
      for (int row = 0; row < rows; ++row) m.values[k][row] = line[row * depth + k];
    }
  }
}

// The four warps of a warpgroup read the same matrix one after another: a decoded matrix is cached
// and reused as long as its bits are the same.
const Matrix& matrix_b(const Operands& o) {
  constexpr size_t kKept = 64;
  static thread_local const auto kept = std::make_unique<std::array<Matrix, kKept>>();
  Matrix& m = (*kept)[(o.b ^ o.b >> 6) % kKept];
  uint16_t bits[Products::kMaxColumns * Products::kDepth];
  const int line = o.trans_b ? o.n : Products::kDepth;
  const SharedMemory& shared = block().shared();
  operand(o.b).for_each_chunk(o.trans_b, 0, o.n, [&](uint32_t address, int row, int chunk) {
    std::memcpy(bits + row * line + chunk * kChunkElements, shared.at(address), kChunkBytes);
  });
  const size_t bytes = static_cast<size_t>(o.n) * Products::kDepth * sizeof(uint16_t);
  if (m.is_b_of(o) && std::memcmp(m.bits, bits, bytes) == 0) return m;
  m.operands = o;
  std::memcpy(m.bits, bits, bytes);
  decode(m);
  return m;
}

using RowsOfA = float[Products::kRows][Products::kMaxDepth];

void shared_a(const Operands& o, RowsOfA& a) {
  const SharedMemory& shared = block().shared();
  operand(o.a).for_each_chunk(o.trans_a, warp_of_group() * Products::kRows, Products::kRows,
                              [&](uint32_t address, int line, int chunk) {
                                const int count = kChunkElements * o.depth() / Products::kDepth;
                                uint16_t bits[kChunkElements];
                                float values[2 * kChunkElements];
                                std::memcpy(bits, shared.at(address), kChunkBytes);
                                unpack(bits, kChunkElements, o.type, values);
                                for (int i = 0; i < count; ++i) {
                                  const int other = chunk * count + i;
                                  (o.trans_a ? a[other][line] : a[line][other]) = values[i];
                                }
                              });
}

#if defined(__x86_64__) && defined(__GNUC__)
#define TILEWISE_EMULATOR_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define TILEWISE_EMULATOR_CLONES
#endif

constexpr int kWidth = 8;  // floats per vector
using Vector = float __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));

// sums[i][j] += a[i][k] * b[k][j], one k below `depth` after another; the products are exact.
TILEWISE_EMULATOR_CLONES
void multiply(float (&sums)[Products::kRows][Products::kMaxColumns], const RowsOfA& a,
              const float (&b)[Products::kMaxDepth][Products::kMaxColumns], int columns,
              int depth) {
  constexpr int kRowsAtOnce = 4;
  for (int i = 0; i < Products::kRows; i += kRowsAtOnce) {
    for (int j = 0; j < columns; j += kWidth) {
      Vector s[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; ++r) std::memcpy(&s[r], &sums[i + r][j], sizeof(Vector));
      for (int k = 0; k < depth; ++k) {
        Vector x;
        std::memcpy(&x, &b[k][j], sizeof(Vector));
        for (int r = 0; r < kRowsAtOnce; ++r) s[r] += a[i + r][k] * x;
      }
      for (int r = 0; r < kRowsAtOnce; ++r) std::memcpy(&sums[i + r][j], &s[r], sizeof(Vector));
    }
  }
}

// The same as tensor cores sum float8 products (arXiv 2412.19437, section 3.5.2): the terms of a
// sum are shifted to the exponent of the largest one, keep 14 bits, and are added exactly.
void multiply_aligned(float (&sums)[Products::kRows][Products::kMaxColumns], const RowsOfA& a,
                      const float (&b)[Products::kMaxDepth][Products::kMaxColumns], int columns,
                      int depth) {
  constexpr int kBits = 14;
  for (int i = 0; i < Products::kRows; ++i) {
    for (int j = 0; j < columns; ++j) {
      float terms[Products::kMaxDepth + 1];
      terms[depth] = sums[i][j];
      float largest = std::abs(terms[depth]);
      for (int k = 0; k < depth; ++k) {
        terms[k] = a[i][k] * b[k][j];
        largest = std::max(largest, std::abs(terms[k]));
      }
      if (largest == 0.0f || !std::isfinite(largest)) {  // also NaN: nothing is aligned
        for (int k = 0; k < depth; ++k) sums[i][j] += terms[k];
        continue;
      }
      const float unit = std::ldexp(1.0f, std::ilogb(largest) + 1 - kBits);
      float units = 0.0f;  // at most (kMaxDepth + 1) * 2^14: exact
      for (int k = 0; k <= depth; ++k) units += std::trunc(terms[k] / unit);
      sums[i][j] = units * unit;
    }
  }
}

}  // namespace

void Products::start() {
  lanes_ = {};
  queue_.clear();
  groups_.clear();
  first_ = first_group_ = started_ = 0;
  started_by_group_.clear();
  for (const auto& sums : accumulators_) {
    sums->in_flight = 0;
    sums->d = {};
  }
}

// --- sums ----------------------------------------------------------------------------------------

Products::Accumulator& Products::accumulator_for(float* d, int n, int lane) {
  Accumulator* free = nullptr;
  for (const auto& sums : accumulators_) {
    float* begin = sums->d[static_cast<size_t>(lane)];
    if (begin == d && sums->n == n) return *sums;
    if (sums->in_flight == 0) {
      if (free == nullptr || sums->used < free->used) free = sums.get();
      continue;
    }
    if (begin != nullptr && d < begin + sums->n / 2 && begin < d + n / 2) {
      fault("wgmma adds to registers that an unfinished wgmma of another shape uses");
    }
  }
  constexpr size_t kKept = 8;
  if (free == nullptr || accumulators_.size() < kKept) {
    accumulators_.push_back(std::make_unique<Accumulator>());
    free = accumulators_.back().get();
  }
  free->d = {};
  free->n = n;
  return *free;
}

// Takes a lane's part of the sums from its registers, which are poison from here on.
void Products::take_sums(Accumulator& sums, float* d, int lane, bool add) const {
  const auto index = static_cast<size_t>(lane);
  const bool fenced = lanes_[index].fences > sums.fences_at_landing[index] || sums.d[index] != d;
  for (int j = 0; j < sums.n / 8; ++j) {
    for (int half = 0; half < 2; ++half) {
      float* to = &sums.sums[lane / 4 + 8 * half][8 * j + lane % 4 * 2];
      const float* from = d + 4 * j + 2 * half;
      if (add && !fenced && std::memcmp(to, from, 8) != 0) {
        fault("wgmma adds to registers that were written with no wgmma_fence between");
      }
      if (add) std::memcpy(to, from, 8);
    }
  }
  std::fill_n(d, sums.n / 2, float_of(uint32_t{SharedMemory::kPoison} << 16 | 1));
}

void Products::put_sums(Accumulator& sums) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    float* d = sums.d[static_cast<size_t>(lane)];
    for (int j = 0; j < sums.n / 8; ++j) {
      for (int half = 0; half < 2; ++half) {
        std::memcpy(d + 4 * j + 2 * half, &sums.sums[lane / 4 + 8 * half][8 * j + lane % 4 * 2], 8);
      }
    }
    sums.fences_at_landing[static_cast<size_t>(lane)] = lanes_[static_cast<size_t>(lane)].fences;
  }
  sums.used = ++uses_;
}

// --- products ------------------------------------------------------------------------------------

void Products::issue(float* d, const Operands& operands, const uint32_t* a) {
  const int lane = block().thread() % kWarpLanes;
  const uint64_t index = lanes_[static_cast<size_t>(lane)].issued++ - first_;
  if (index == queue_.size()) {
    if (operands.n % 8 != 0 || operands.n < 8 || operands.n > kMaxColumns) {
      fault(text("wgmma with n = %d", operands.n));
    }
    Accumulator& sums = accumulator_for(d, operands.n, lane);
    queue_.push_back({.operands = operands, .accumulator = &sums, .a = {}});
    ++sums.in_flight;
  }
  Product& product = queue_[index];
  if (!(product.operands == operands)) {
    fault("the lanes of a warp start different wgmmas, or give different descriptors");
  }
  Accumulator& sums = *product.accumulator;
  // Whether this is the lane's first unfinished product with these sums.
  bool first = true;
  for (uint64_t i = 0; i < index; ++i) first &= queue_[i].accumulator != &sums;
  if (first) {
    take_sums(sums, d, lane, operands.add);
    sums.d[static_cast<size_t>(lane)] = d;
  } else if (sums.d[static_cast<size_t>(lane)] != d) {
    fault("the lanes of a warp give different registers to a wgmma");
  }
  if (a != nullptr) {
    for (int i = 0; i < 4; ++i) product.a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = a[i];
  }
  product.lanes |= 1u << lane;
  if (product.lanes != kAllLanes) return;
  check_warps_agree(product.operands);
  check(product);
  if (block().options().early_copies) execute(product);
}

// Checks that the four warps start the same products.
void Products::check_warps_agree(const Operands& operands) {
  std::vector<Operands>& started =
      block().products(block().thread() / kLanes - warp_of_group()).started_by_group_;
  const uint64_t index = started_++;
  if (index == started.size()) {
    started.push_back(operands);
  } else if (!(started[index] == operands)) {
    fault("the warps of a warpgroup start different wgmmas, or give different descriptors");
  }
}

void Products::check(const Product& product) const {
  SharedMemory& shared = block().shared();
  const Moment moment = block().moment();
  for_each_chunk(product.operands, [&](uint32_t address, int, int) {
    shared.start_async_read(address, kChunkBytes, "wgmma", moment);
  });
}

void Products::execute(Product& product) {
  const Operands& o = product.operands;
  RowsOfA a;
  if (o.a_in_registers) {
    uint16_t bits[kRows][kDepth];
    std::memcpy(bits, product.a, sizeof(bits));
    for (int row = 0; row < kRows; ++row) unpack(bits[row], kDepth, o.type, a[row]);
  } else {
    shared_a(o, a);
  }
  Accumulator& sums = *product.accumulator;
  if (!o.add) {
    for (auto& row : sums.sums) std::fill_n(row, o.n, 0.0f);
  }
  const bool aligned = o.type == OperandType::float8 && block().options().truncate_sums;
  (aligned ? multiply_aligned : multiply)(sums.sums, a, matrix_b(o).values, o.n, o.depth());
  product.done = true;
  ++block().counts().warpgroup_products;
}

void Products::finish(Product& product) {
  if (!product.done) execute(product);
  SharedMemory& shared = block().shared();
  const Moment moment = block().moment();
  for_each_chunk(product.operands, [&](uint32_t address, int, int) {
    shared.finish_async_read_by_warp(address, moment);
  });
  if (--product.accumulator->in_flight == 0) put_sums(*product.accumulator);
}

void Products::fence() { ++lanes_[static_cast<size_t>(block().thread() % kWarpLanes)].fences; }

void Products::commit() {
  Lane& lane = lanes_[static_cast<size_t>(block().thread() % kWarpLanes)];
  const uint64_t index = lane.committed++ - first_group_;
  if (index == groups_.size()) {
    groups_.push_back(lane.issued);
  } else if (groups_[index] != lane.issued) {
    fault("the lanes of a warp commit different groups of wgmmas");
  }
}

void Products::wait(int pending) {
  for (const Lane& lane : lanes_) {
    if (lane.issued == lanes_[0].issued && lane.committed == lanes_[0].committed) continue;
    fault("the lanes of a warp wait for different groups of wgmmas");
  }
  while (static_cast<int>(groups_.size()) > pending) {
    for (; first_ < groups_.front(); ++first_) {
      finish(queue_.front());
      queue_.pop_front();
    }
    groups_.pop_front();
    ++first_group_;
  }
}

void Products::check_exit() const {
  if (!queue_.empty()) fault("the thread exits while a wgmma of its warp is in flight");
}

// --- the instructions ----------------------------------------------------------------------------

void wgmma_fence() { block().products().fence(); }
void wgmma_commit_group() { block().products().commit(); }

void wgmma_wait_group(int pending) {
  struct Groups {
    int pending;
  } call{pending};
  block().meet(Collective::wgmma_wait_group, call, [](std::array<Groups*, kLanes>& calls) {
    block().note_warp_barrier();
    block().products().wait(calls[0]->pending);
  });
}

void wgmma(float* d, int n, bool bf16, uint64_t a, uint64_t b, bool trans_a, bool trans_b,
           bool add) {
  const OperandType type = bf16 ? OperandType::bf16 : OperandType::f16;
  block().products().issue(d, {n, type, false, trans_a, trans_b, add, a, b}, nullptr);
}

void wgmma(float* d, int n, bool bf16, const uint32_t (&a)[4], uint64_t b, bool trans_b, bool add) {
  const OperandType type = bf16 ? OperandType::bf16 : OperandType::f16;
  block().products().issue(d, {n, type, true, false, trans_b, add, 0, b}, a);
}

void wgmma_float8(float* d, int n, uint64_t a, uint64_t b, bool add) {
  block().products().issue(d, {n, OperandType::float8, false, false, false, add, a, b}, nullptr);
}

void wgmma_float8(float* d, int n, const uint32_t (&a)[4], uint64_t b, bool add) {
  block().products().issue(d, {n, OperandType::float8, true, false, false, add, 0, b}, a);
}

}  // namespace tilewise::cuda::emulator
