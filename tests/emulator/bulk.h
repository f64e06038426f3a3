// Copies by the tensor memory accelerator. Loads are counted by an mbarrier (barriers.h); stores
// and sums belong to bulk groups of the thread that starts them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "cuda/tensor_map.h"

namespace tilewise::cuda::emulator {

// Bulk groups of a thread. A copy reads shared memory when it starts or when it is waited for.
class BulkCopies {
 public:
  void start(uint32_t from, int bytes, const char* what, std::function<void()> land);
  void commit();
  // Until shared memory has been read; until all is done.
  void wait_read(int pending);
  void wait(int pending);
  void check_exit() const;
  // Others are told that what this thread did is done.
  void check_release() const;

 private:
  struct Copy {
    uint32_t from;
    int bytes;
    const char* what;
    std::function<void()> land;
  };
  std::deque<Copy> in_flight_;  // that have not read yet
  std::deque<int> groups_;      // how many copies each committed group has
  int read_ = 0;                // groups, the first ones, of which it is known that they have read
  int open_ = 0;                // copies not yet in a group
};

// What cuTensorMapEncodeTiled refuses, as Fault. The map holds the shape itself.
void encode_tensor_map(TensorMap& map, const TensorMapShape& shape);

}  // namespace tilewise::cuda::emulator
