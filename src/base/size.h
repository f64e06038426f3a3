// Products of sizes from callers. Each size has been checked, but their product has not.
#pragma once

#include "base/math.h"

namespace tilewise {

// A number of bytes or elements that saturates. Products and sums of at least kMax become kMax,
// which no memory can hold: the request is rejected, and no arithmetic wraps on the way there.
class Size {
 public:
  static constexpr int64_t kMax = int64_t{1} << 62;

  // Implicit, so that factors and terms can be plain integers.
  TILEWISE_FN constexpr Size(int64_t value) : value_(min(value, kMax)) {}

  TILEWISE_FN constexpr int64_t value() const { return value_; }
  TILEWISE_FN constexpr bool fits() const { return value_ < kMax; }

  TILEWISE_FN friend Size operator*(Size a, Size b) {
    int64_t product = 0;
    return checked_mul(a.value_, b.value_, &product) ? product : kMax;
  }
  TILEWISE_FN friend Size operator+(Size a, Size b) {
    return min(a.value_, kMax - b.value_) + b.value_;
  }

 private:
  int64_t value_;
};

}  // namespace tilewise
