#include "capi/views.h"

#include <algorithm>

#include "base/math.h"
#include "capi/refusal.h"

namespace tilewise::capi {
namespace {

// Maximum number of bytes from the first to the last element of a view.
constexpr int64_t kMaxSpanBytes = int64_t{1} << 62;

uint64_t magnitude(int64_t x) {
  return x < 0 ? uint64_t{0} - static_cast<uint64_t>(x) : static_cast<uint64_t>(x);
}

void check_span(const View& view) {
  const int64_t limit = kMaxSpanBytes / view.element_bytes;
  int64_t span = view.columns;
  for (const Dimension& d : view.dimensions) {
    if (d.size <= 1) continue;
    int64_t reach = 0;
    const uint64_t stride = magnitude(d.stride);
    const bool fits = stride <= static_cast<uint64_t>(limit) &&
                      checked_mul(d.size - 1, static_cast<int64_t>(stride), &reach) &&
                      checked_add(span, reach, &span) && span <= limit;
    require(fits, view.name, d.stride_name, " is ", d.stride, ": with ", d.size,
            " entries the tensor spans more than the allowed ", kMaxSpanBytes, " bytes");
  }
}

// With dimensions sorted by stride, each must step over everything that the smaller ones cover.
void check_disjoint(const View& view) {
  std::array<Dimension, 3> sorted = view.dimensions;
  std::sort(sorted.begin(), sorted.end(), [](const Dimension& a, const Dimension& b) {
    return magnitude(a.stride) < magnitude(b.stride);
  });
  int64_t covered = view.columns;
  for (const Dimension& d : sorted) {
    if (d.size <= 1) continue;
    const auto stride = static_cast<int64_t>(magnitude(d.stride));
    require(stride >= covered, view.name, d.stride_name, " is ", d.stride,
            ": the entries of an output must not overlap, so it must be at least ", covered);
    covered += (d.size - 1) * stride;
  }
}

}  // namespace

bool View::empty() const {
  return columns == 0 || std::any_of(dimensions.begin(), dimensions.end(),
                                     [](const Dimension& d) { return d.size == 0; });
}

void check_layout(const View& view) {
  if (view.empty()) return;
  check_span(view);
  if (view.access == Access::write) check_disjoint(view);
}

void check_data(const View& view) {
  if (view.empty()) return;
  require(view.data != nullptr, view.name, " is NULL: a pointer to its data is needed");
  check_aligned(view.name, view.data, view.element_bytes);
}

void check_range(const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) refuse_range(name, value, lowest, highest);
}

void refuse_range(const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (lowest == highest)
    refuse(TILEWISE_INVALID_ARGUMENT, name, " is ", value, ": it must be ", lowest);
  refuse(TILEWISE_INVALID_ARGUMENT, name, " is ", value, ": it must be ", lowest, " to ", highest);
}

void check_aligned(const char* name, const void* pointer, int64_t bytes) {
  require(reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0, name, " is ",
          pointer, ": an address that is a multiple of ", bytes, " bytes is needed");
}

void check_rows(const char* names, int64_t a, int64_t b, int64_t c) {
  const auto count = [](int64_t factor) { return max<int64_t>(1, factor); };
  int64_t product = 0;
  const bool fits = checked_mul(count(a), count(b), &product) &&
                    checked_mul(product, count(c), &product) && product <= kMaxRows;
  require(fits, names, " is ", a, " * ", b, " * ", c, ": it must be at most ", kMaxRows);
}

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case TILEWISE_FLOAT32:
      return "float32";
    case TILEWISE_FLOAT16:
      return "float16";
    case TILEWISE_BFLOAT16:
      return "bfloat16";
    case TILEWISE_FLOAT8_E4M3:
      return "float8_e4m3";
    default:
      return "unknown";
  }
}

bool is_dtype(int32_t dtype) { return dtype >= TILEWISE_FLOAT32 && dtype <= TILEWISE_FLOAT8_E4M3; }

}  // namespace tilewise::capi
