// Lays out a workspace: pieces of the caller's memory, each starting at a multiple of 64 bytes.
#pragma once

#include "cuda/plan.h"

namespace tilewise::cuda {

class Workspace {
 public:
  template <class T>
  Piece take(int64_t count) {
    const Piece piece = {bytes_, count * static_cast<int64_t>(sizeof(T))};
    bytes_ = round_up(bytes_ + piece.bytes, kAlignment);
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 64;
  int64_t bytes_ = 0;
};

}  // namespace tilewise::cuda
