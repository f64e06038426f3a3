// Lays out a workspace: regions of the caller's memory that each start at a multiple of 64 bytes.
#pragma once

#include "base/size.h"
#include "cuda/plan.h"

namespace tilewise::cuda {

class Workspace {
 public:
  template <class T>
  Region take(Size count) {
    const Size bytes = count * static_cast<int64_t>(sizeof(T));
    const Region region = {bytes_.value(), bytes.value()};
    bytes_ = round_up((bytes_ + bytes).value(), kAlignment);
    return region;
  }
  int64_t bytes() const { return bytes_.value(); }

 private:
  static constexpr int64_t kAlignment = 64;
  Size bytes_ = 0;
};

}  // namespace tilewise::cuda
