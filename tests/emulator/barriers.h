// Synchronisation of some of the threads of a block: mbarriers in shared memory, which also count
// the bytes of asynchronous copies, named barriers, and the register pool of setmaxnreg.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "emulator/clocks.h"

namespace tilewise::cuda::emulator {

// An asynchronous write to shared memory that has started and whose phase has not yet ended.
struct AsyncWrite {
  uint32_t to;
  int bytes;
  std::function<void()> land;
};

class SharedMemory;

// The mbarriers of a block.
class MemoryBarriers {
 public:
  void start(SharedMemory& shared, int rank);
  void init(uint32_t address, int arrivals);
  void arrive(uint32_t address, int64_t bytes);
  // Arrives when `writes`, copies that a thread has started, have landed.
  void arrive_after(uint32_t address, std::vector<AsyncWrite> writes);
  void wait(uint32_t address, int parity);
  // A copy that signals the barrier at `address` has started. It lands now (early copies) or when
  // all threads wait.
  void start_write(uint32_t address, AsyncWrite write);
  // tcgen05.commit: returns the barrier, at which the tensor core arrives later with what `known`
  // says.
  int start_commit(uint32_t address);
  void finish_commit(int barrier, const Clock& known);
  // Called when all threads wait: lands the bytes of one barrier and ends its phase. False if no
  // barrier has bytes to land.
  bool land();
  // Describes bytes whose phase never ended; "" if there are none.
  std::string unfinished() const;
  std::string describe(int barrier) const;

 private:
  struct Barrier {
    uint32_t address = 0;
    int arrivals = 0;
    int pending = 0;        // arrivals still expected
    int64_t bytes = 0;      // expected minus landed
    int64_t in_flight = 0;  // started minus landed
    uint32_t phase = 0;
    int initialiser = 0;
    uint32_t initialised = 0;
    uint32_t first_write = 0;  // when the oldest of `writes` started
    std::vector<AsyncWrite> writes;
    std::vector<int> waiting;
    Clock arriving;  // what the threads knew that have arrived
    Clock complete;  // the same at the end of the last phase, which waiting threads learn
  };

  Barrier& find(uint32_t address, const char* what);
  // The barrier at `address`, which copies or the tensor core will signal.
  Barrier& find_for_engine(uint32_t address, const char* what);
  void check_arrival(const Barrier& b, const char* what) const;
  int index_of(const Barrier& b) const { return static_cast<int>(&b - barriers_.data()); }
  void check_bytes(const Barrier& b) const;
  void add_write(Barrier& b, AsyncWrite write);
  void end_phase(Barrier& b);
  void land(Barrier& b);

  SharedMemory* shared_ = nullptr;
  int rank_ = 0;  // rank of the block in its cluster
  std::vector<Barrier> barriers_;
};

class NamedBarriers {
 public:
  static constexpr int kCount = 16;
  void start() { barriers_ = {}; }
  // Returns whether any participating thread passed x = true; meaningful to threads that wait.
  bool arrive(int barrier, int threads, bool wait, bool x = false);
  std::string describe(int barrier) const;

 private:
  struct Barrier {
    int threads = 0;
    int arrived = 0;
    bool any = false;     // whether any x is set, of the threads that have arrived
    bool result = false;  // the result of the last completed use
    std::vector<int> waiting;
    Clock known;
  };
  std::array<Barrier, kCount> barriers_;
};

// Registers per thread, for each warp; other warps may take what a warp gives back.
class Registers {
 public:
  void start(int threads);
  // Called by all lanes of a warp: waits until the pool has enough registers.
  void increase(int count);
  void decrease(int count);
  // Describes a warpgroup whose warps disagree; "" if there is none.
  std::string disagreement() const;
  std::string describe(int wanted) const;

 private:
  static constexpr int kPerSm = 64 * 1024;
  void check(int count, const char* what) const;
  bool take(int warp, int count);

  std::vector<int> per_warp_;
  std::vector<int> waiting_;  // threads
  int free_ = 0;              // registers per lane
};

}  // namespace tilewise::cuda::emulator
