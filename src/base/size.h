// Sizes that a caller's numbers multiply to. Each of the numbers has been checked, their product
// has not.
#pragma once

#include "base/math.h"

namespace tilewise {

// A count of bytes or of what they hold. Products and sums of kMost and more are kMost, which no
// memory has: whoever asked for them is refused, and no arithmetic wraps on the way there.
class Size {
 public:
  static constexpr int64_t kMost = int64_t{1} << 62;

  TILEWISE_FN constexpr Size(int64_t value) : value_(min(value, kMost)) {}  // it stands for one

  TILEWISE_FN constexpr int64_t value() const { return value_; }
  TILEWISE_FN constexpr bool fits() const { return value_ < kMost; }

  TILEWISE_FN friend Size operator*(Size a, Size b) {
    int64_t product = 0;
    return checked_mul(a.value_, b.value_, &product) ? product : kMost;
  }
  TILEWISE_FN friend Size operator+(Size a, Size b) {
    return min(a.value_, kMost - b.value_) + b.value_;
  }

 private:
  int64_t value_;
};

}  // namespace tilewise
