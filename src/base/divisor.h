// Fast division of small numbers by a divisor that is known before the kernel starts.
#pragma once

#include "base/platform.h"

namespace tilewise {

// n / value and n % value for 0 <= n < 2^31, value >= 1, as a multiplication and a shift (Granlund
// & Montgomery, PLDI 1994): a division takes about 70 cycles on a GPU, and a block does several in
// a row to find its tile. With s = ceil(log2 value) and m = ceil(2^(31 + s) / value), which is
// below 2^32, floor(n m / 2^(31 + s)) is the quotient.
class Divisor {
 public:
  // Implicit, so that an integer can be given where a Divisor is expected.
  TILEWISE_FN constexpr Divisor(int32_t value = 1) : value_(value) {
    while (shift_ < 31 && (int64_t{1} << shift_) < value) ++shift_;
    const uint64_t power = uint64_t{1} << (31 + shift_);
    const auto divisor = static_cast<uint64_t>(value < 1 ? 1 : value);
    magic_ = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }

  TILEWISE_FN constexpr operator int32_t() const { return value_; }

  TILEWISE_FN constexpr int32_t quotient(int32_t n) const {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(n) * 2) * magic_;
    return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift_);
  }
  TILEWISE_FN constexpr int32_t remainder(int32_t n) const { return n - quotient(n) * value_; }

 private:
  int32_t value_;
  int32_t shift_ = 0;
  uint32_t magic_ = 0;
};

}  // namespace tilewise
