// Copies by the tensor memory accelerator. Loads are counted by an mbarrier (barriers.h); stores
// and reductions belong to bulk groups of the thread that starts them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "cuda/tensor_map.h"

namespace tilewise::cuda::emulator {

// The bulk groups of a thread. A copy reads shared memory when it starts or when it is waited for.
class BulkCopies {
 public:
  void start(uint32_t from, int bytes, const char* what, std::function<void()> land);
  void commit();
  // Waits until shared memory has been read; waits until the copies are complete.
  void wait_read(int pending);
  void wait(int pending);
  void check_exit() const;
  // Checks that no copy is unfinished when a release tells others that this thread's work is done.
  void check_release() const;

 private:
  struct Copy {
    uint32_t from;
    int bytes;
    const char* what;
    std::function<void()> land;
  };
  std::deque<Copy> in_flight_;  // copies that have not read yet
  std::deque<int> groups_;      // how many copies each committed group has
  int read_ = 0;                // number of leading groups known to have been read
  int open_ = 0;                // copies not yet in a group
};

// Throws Fault for anything that cuTensorMapEncodeTiled refuses. The map holds the shape itself.
void encode_tensor_map(TensorMap& map, const TensorMapShape& shape);

}  // namespace tilewise::cuda::emulator
