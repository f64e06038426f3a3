// Tensor memory of a block (sm_100): its columns, and the warps and products that
// allocated, wrote and read them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/clocks.h"

namespace tilewise::cuda::emulator {

// An access is checked when it starts. What is known of a column is the same in 32 lanes, because
// the four warps that can access these lanes do so with all lanes at once.
class TensorMemory {
 public:
  static constexpr int kColumns = 512;
  static constexpr int kLanes = 128;
  static constexpr int kWarpLanes = 32;
  template <class T>
  using LaneRegisters = std::array<T*, kWarpLanes>;

  // What a product does with tensor memory: n columns of sums from column d on, and the operand in
  // kOperandColumns columns from a on, if it is there.
  struct Product {
    static constexpr int kOperandColumns = 8;
    uint32_t d;
    uint32_t kind;
    int n;
    bool add;
    bool a_in_tensor;
    uint32_t a;
  };

  void start(int rank);

  // Executed by all lanes of a warp together.
  uint32_t alloc(int columns);
  void dealloc(uint32_t address, int columns);
  void relinquish() { relinquished_ = true; }
  void load(const LaneRegisters<uint32_t>& d, int n, uint32_t from);
  void store(const LaneRegisters<const uint32_t>& d, int n, uint32_t to);
  void wait_load();
  void wait_store();

  // Executed by one thread.
  void fence_before();
  void fence_after();
  // A product is issued at `time`; it runs later.
  void issue(const Product& product, uint32_t time);

  uint32_t* at(int lane, int column) {
    return &memory_[static_cast<size_t>(lane) * kColumns + static_cast<size_t>(column)];
  }
  void check_exit() const;
  // Describes columns that are still allocated; "" if there are none.
  std::string unfinished() const;

 private:
  static constexpr int kQuarters = kLanes / kWarpLanes;
  static constexpr int kWarps = 32;
  static constexpr int kNone = -1;
  static constexpr int kTensorCore = -2;

  // One column in the 32 lanes of a quarter.
  struct Cell {
    int writer = kNone;                                     // a warp of the block, or kTensorCore
    uint32_t write_time = 0;                                // for a product: when it was issued
    uint32_t d = 0, kind = 0;                               // of the product that wrote it
    int issuer = 0;                                         // the thread that issued this product
    std::array<uint32_t, kWarps / kQuarters> read_times{};  // of the warps that can access it
    uint32_t operand_time = 0;  // when the last product was issued that reads it as an operand
    int loading = 0;            // loads that are not waited for
    int storing = kNone;        // the warp whose store is not waited for
  };

  // The access that is checked. All of its threads must know what happened before.
  struct Access {
    const char* what;
    int first_thread;
    int threads;
    bool writes;
    int warp;
  };

  struct Columns {
    uint32_t address;
    int n;
  };
  struct Load {
    LaneRegisters<uint32_t> d;
    Columns from;
  };
  struct Allocation {
    int begin;
    int columns;
    int warp;
  };

  Cell& cell(int quarter, int column) {
    return cells_[static_cast<size_t>(quarter * kColumns + column)];
  }
  Access by_warp(const char* what, bool writes) const;
  int first_thread(int warp) const;
  int checked_columns(uint32_t address, int n, const char* what) const;
  int own_quarter(uint32_t address, const char* what) const;
  void check_access(const Cell& c, const Access& access, int quarter, int column) const;
  void check_products(const Cell& c, const Access& access, int quarter, int column) const;
  // Faults unless all threads of `access` know that what `actor` did at `time` is done.
  void check_known(const Access& access, int actor, uint32_t time, int quarter, int column,
                   const char* did) const;
  bool knows(int thread, int actor, uint32_t time) const;
  std::string missing(int thread, int actor, uint32_t time) const;
  // Returns whether the order of products relies on their issue alone.
  bool issue_sums(const Product& product, const Access& access, int quarter, uint32_t time);
  void issue_operand(const Product& product, const Access& access, int quarter, uint32_t time);
  void copy_to_registers(const Load& load);

  int rank_ = 0;
  std::vector<uint32_t> memory_;  // [lane][column]
  std::vector<Cell> cells_;       // [quarter][column]
  std::vector<Allocation> allocations_;
  bool relinquished_ = false;
  std::array<std::vector<Load>, kWarps> loads_;  // not waited for
  std::array<std::vector<Columns>, kWarps> stores_;
  std::vector<std::vector<uint32_t>> fences_before_;  // times of each thread's fences
  std::vector<Clock> known_at_fence_after_;           // of each thread, at its last fence
};

}  // namespace tilewise::cuda::emulator
