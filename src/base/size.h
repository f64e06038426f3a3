// Products of sizes from callers. Each size has been checked, their product has not.
#pragma once

#include "base/math.h"

namespace tilewise {

// A number of bytes or elements that saturates. Products and sums of at least kMost become kMost,
// which no memory can hold: the request is rejected, and no arithmetic wraps on the way there.
class Size {
 public:
  static constexpr int64_t kMost = int64_t{1} << 62;

  TILEWISE_FN constexpr Size(int64_t value)
      : value_(min(value, kMost)) {}  // implicit: it replaces a number

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
