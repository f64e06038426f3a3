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
  void wait(int pending);
  void check_exit() const;

 private:
  struct Copy {
    uint32_t from;
    int bytes;
    const char* what;
    std::function<void()> land;
  };
  std::deque<Copy> in_flight_;
  std::deque<int> groups_;  // how many copies each committed group has
  int open_ = 0;            // not yet in a group
};

// What cuTensorMapEncodeTiled refuses, as Fault. The map holds the shape itself.
void encode_tensor_map(TensorMap& map, const TensorMapShape& shape);

}  // namespace tilewise::cuda::emulator
