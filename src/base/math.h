// Integer arithmetic shared by host and device code.
#pragma once

#include "base/platform.h"

namespace tilewise {

template <class T>
TILEWISE_FN constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
TILEWISE_FN constexpr T max(T a, T b) {
  return a < b ? b : a;
}

TILEWISE_FN constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return max(low, min(x, high));
}

TILEWISE_FN constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

TILEWISE_FN constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// For sizes from callers: each stores the product or sum and returns whether it fits into 64 bits.
TILEWISE_FN bool checked_mul(int64_t a, int64_t b, int64_t* result) {
  return !__builtin_mul_overflow(a, b, result);
}

TILEWISE_FN bool checked_add(int64_t a, int64_t b, int64_t* result) {
  return !__builtin_add_overflow(a, b, result);
}

// [begin, end); empty when end <= begin.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  TILEWISE_FN constexpr int64_t size() const { return end > begin ? end - begin : 0; }
  TILEWISE_FN constexpr bool empty() const { return end <= begin; }
  TILEWISE_FN constexpr bool contains(int64_t i) const { return i >= begin && i < end; }
};

TILEWISE_FN constexpr Range intersect(Range a, Range b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

}  // namespace tilewise
