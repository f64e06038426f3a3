// Bank conflicts of ld.shared and st.shared. Lanes run one after another here, so their accesses
// are logged and, when the warp meets, matched by the place in the kernel.
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
  // Returns the conflicts of everything noted, and clears the log.
  int64_t settle();

 private:
  std::array<std::vector<Access>, 32> lanes_;
  bool empty_ = true;
};

}  // namespace tilewise::cuda::emulator
