// When the launch after a main kernel may begin.
#pragma once

#include <cstdint>

namespace tilewise::cuda {

// A launch that may overlap with the one before it (Start::dependent of runtime.h) is let in as
// soon as all blocks have asked for that or are done, and waits for their end. Its blocks take the
// places that are free then.
enum class NextStart : int8_t {
  at_end,             // nobody asks
  after_first_keys,   // when a block has asked for its first keys
  before_last_result  // when it has met its last key
};

}  // namespace tilewise::cuda
