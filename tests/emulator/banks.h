// Bank conflicts of ld.shared and st.shared. The emulator runs lanes one after another, so their
// accesses are logged and, at the next operation of the whole warp, matched by instruction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilewise::cuda::emulator {

struct Access {
  const void* place;  // the return address of the wrapper, which identifies the instruction
  uint32_t offset;
  int bytes;
};

// Wavefronts beyond the number that the bytes need: how often a bank has to serve two different
// words to the lanes that share a wavefront (32 lanes of 4 bytes, 16 of 8, 8 of 16).
int64_t bank_conflicts(const std::vector<Access>& instruction);

class AccessLog {
 public:
  void note(int lane, const Access& access) {
    lanes_[static_cast<size_t>(lane)].push_back(access);
    empty_ = false;
  }
  bool empty() const { return empty_; }
  // Returns the number of conflicts between the logged accesses, and clears the log.
  int64_t take_conflicts();

 private:
  std::array<std::vector<Access>, 32> lanes_;
  bool empty_ = true;
};

}  // namespace tilewise::cuda::emulator
