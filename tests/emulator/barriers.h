// Where threads of a block wait for some of the others: mbarriers in shared memory, which also
// count the bytes of asynchronous copies, named barriers, and the pool of registers.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "emulator/clocks.h"

namespace tilewise::cuda::emulator {

// An asynchronous write of shared memory, between its start and the end of the phase that counts
// its bytes.
struct AsyncWrite {
  uint32_t to;
  int bytes;
  std::function<void()> land;
};

class SharedMemory;

// Those of a block.
class MemoryBarriers {
 public:
  void start(SharedMemory& shared, int rank);
  void init(uint32_t address, int arrivals);
  void arrive(uint32_t address, int64_t bytes);
  // When `writes`, which have started, have landed: those of a thread.
  void arrive_behind(uint32_t address, std::vector<AsyncWrite> writes);
  void wait(uint32_t address, int parity);
  // A copy that `address` counts has started. It lands now or when all threads wait.
  void start_write(uint32_t address, AsyncWrite write);
  // All threads wait: the bytes of one barrier land and end its phase. False when there is none.
  bool land();
  // Of the bytes that no phase has ended for, or "".
  std::string unfinished() const;
  std::string describe(int barrier) const;

 private:
  struct Barrier {
    uint32_t address = 0;
    int arrivals = 0;
    int pending = 0;        // arrivals to come
    int64_t bytes = 0;      // announced less landed
    int64_t in_flight = 0;  // started less landed
    uint32_t phase = 0;
    int initialiser = 0;
    uint32_t initialised = 0;
    uint32_t first_write = 0;  // when the oldest of `writes` started
    std::vector<AsyncWrite> writes;
    std::vector<int> waiting;
    Clock arriving, complete;  // what was known to those who arrived, up to the last whole phase
  };

  Barrier& find(uint32_t address, const char* what);
  int index_of(const Barrier& b) const { return static_cast<int>(&b - barriers_.data()); }
  void check_bytes(const Barrier& b) const;
  void add_write(Barrier& b, AsyncWrite write);
  void end_phase(Barrier& b);
  void land(Barrier& b);

  SharedMemory* shared_ = nullptr;
  int rank_ = 0;  // of the block in its cluster
  std::vector<Barrier> barriers_;
};

class NamedBarriers {
 public:
  static constexpr int kCount = 16;
  void start() { barriers_ = {}; }
  // Whether x is true for somebody who has met; for who waits, when it goes on.
  bool arrive(int barrier, int threads, bool wait, bool x = false);
  std::string describe(int barrier) const;

 private:
  struct Barrier {
    int threads = 0;
    int arrived = 0;
    bool some = false;    // of those who have arrived
    bool result = false;  // of those who met last
    std::vector<int> waiting;
    Clock known;
  };
  std::array<Barrier, kCount> barriers_;
};

// Registers a thread, per warp; what warps give back others may take.
class Registers {
 public:
  void start(int threads);
  // Together by the lanes of a warp: waits until the pool has them.
  void increase(int count);
  void decrease(int count);
  // Warpgroups whose warps do not agree, or "".
  std::string disagreement() const;
  std::string describe(int wanted) const;

 private:
  static constexpr int kPerMultiprocessor = 64 * 1024;
  void check(int count, const char* what) const;
  bool take(int warp, int count);

  std::vector<int> of_warp_;
  std::vector<int> waiting_;  // threads
  int free_ = 0;              // registers of a lane
};

}  // namespace tilewise::cuda::emulator
