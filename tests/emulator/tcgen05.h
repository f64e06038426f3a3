// The tensor core of a block (sm_100): tcgen05.mma and tcgen05.commit, one after another.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "emulator/clocks.h"

namespace tilewise::cuda::emulator {

struct TensorProduct {
  uint32_t d;  // address in tensor memory
  bool a_in_tensor;
  uint64_t a;  // address in tensor memory or descriptor
  uint64_t b;
  uint32_t kind;
  bool add;
};

// A product runs when it is issued (early copies) or when no thread can continue without it.
class TensorCore {
 public:
  void start(int rank);
  // Executed by one thread.
  void issue(const TensorProduct& product);
  void commit(uint32_t barrier);
  // Called when all threads wait: runs products up to the next arrival of a commit. False if no
  // commit is in the queue.
  bool land();
  // Describes work that is still queued; "" if there is none.
  std::string unfinished() const;

 private:
  struct Task {
    bool commits;
    TensorProduct product;
    int barrier;
    Clock known;  // what the thread knew at its commit, and what the commit says of the products
  };

  void run(const Task& task);
  void execute(const TensorProduct& product);

  int rank_ = 0;
  std::deque<Task> queue_;
};

}  // namespace tilewise::cuda::emulator
