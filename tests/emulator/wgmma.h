// Asynchronous matrix products of a warpgroup. Every warp multiplies its 16 rows by itself, when it
// starts the product or when it waits for it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emulator/swizzled_operand.h"

namespace tilewise::cuda::emulator {

enum class OperandType { f16, bf16, float8 };

// The k of a product is `kDepth` units of 16 bits, of which each holds two numbers of float8.
struct Operands {
  int n;
  OperandType type;
  bool a_in_registers;
  bool trans_a;
  bool trans_b;
  bool add;
  uint64_t a;
  uint64_t b;

  bool operator==(const Operands&) const = default;
  int depth() const { return SwizzledOperand::kDepth * (type == OperandType::float8 ? 2 : 1); }
};

// The products of a warp.
class Products {
 public:
  static constexpr int kRows = 16;
  static constexpr int kDepth = SwizzledOperand::kDepth;
  static constexpr int kMaxDepth = 2 * kDepth;
  static constexpr int kMaxColumns = 256;

  void start();
  // Called by one lane; `a` are its registers if they hold the operand.
  void issue(float* d, const Operands& operands, const uint32_t* a);
  void fence();
  void commit();
  // Called by all lanes together.
  void wait(int pending);
  void check_exit() const;
  // The number of products that this warp has started.
  uint64_t count() const { return started_; }

 private:
  static constexpr int kWarpLanes = 32;

  struct Accumulator {
    std::array<float*, kWarpLanes> d{};  // null until the lane issues its first product
    std::array<uint64_t, kWarpLanes> fences_at_landing{};  // of the lane, when the sums landed
    int n = 0;
    int in_flight = 0;  // products
    uint64_t used = 0;  // time of last use, for reuse
    alignas(64) float sums[kRows][kMaxColumns];
  };

  struct Product {
    Operands operands;
    Accumulator* accumulator;
    uint32_t lanes = 0;  // the lanes that have issued it
    bool done = false;
    uint32_t a[kRows][kDepth / 2];  // pairs of units, if the operand is in registers
  };

  struct Lane {
    uint64_t issued = 0;
    uint64_t committed = 0;
    uint64_t fences = 1;
  };

  Accumulator& accumulator_for(float* d, int n, int lane);
  void take_sums(Accumulator& sums, float* d, int lane, bool add) const;
  void put_sums(Accumulator& sums);
  void check_warps_agree(const Operands& operands);
  void check(const Product& product) const;
  void finish(Product& product);
  void execute(Product& product);

  std::array<Lane, kWarpLanes> lanes_;
  uint64_t started_ = 0;  // products issued by all lanes
  // In the first warp of a warpgroup: all products that any of its warps has started.
  std::vector<Operands> started_by_group_;
  std::deque<Product> queue_;
  uint64_t first_ = 0;           // the index of the first product in the queue
  std::deque<uint64_t> groups_;  // the end of each committed group
  uint64_t first_group_ = 0;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
  uint64_t uses_ = 0;
};

}  // namespace tilewise::cuda::emulator
