// Where key j of a sequence lives: strided, variable length or paged.
#pragma once

#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Keys are counted inside the sequence, after any left padding. k and v share the geometry; only
// their strides differ, so one source serves both, and the gradients too (`dense`).
struct KvSource {
  const int32_t* pages = nullptr;  // block table row of this sequence; null: not paged
  int64_t page_size = 0;
  int64_t slot = 0;        // index along stride_batch
  int64_t first = 0;       // rows before key 0
  uint32_t last_page = 0;  // of the tensors: what an entry may be at most

  // The page of entry i of the table; the last one where that does not fit.
  TILEWISE_FN uint32_t page(int64_t i) const {
    return min(static_cast<uint32_t>(pages[i]), last_page);
  }

  // Entries of the table that hold keys; none where there is no table.
  TILEWISE_FN Range entries(Range keys) const {
    if (pages == nullptr || keys.empty()) return {};
    return {(first + keys.begin) / page_size, (first + keys.end - 1) / page_size + 1};
  }

  // Offset in elements of key j in `view`, head and column 0.
  TILEWISE_FN int64_t offset(const tilewise_tensor& view, int64_t j) const {
    const int64_t row = first + j;
    if (pages == nullptr) return slot * view.stride_batch + row * view.stride_row;
    return page(row / page_size) * view.stride_batch + (row % page_size) * view.stride_row;
  }

  // The same where rows are fewer than 2^31: a GPU divides 64-bit numbers in a call.
  TILEWISE_FN int64_t offset_32(const tilewise_tensor& view, int32_t j) const {
    if (pages == nullptr) return offset(view, j);
    const auto row = static_cast<uint32_t>(first + j);
    const auto size = static_cast<uint32_t>(page_size);
    return page(row / size) * view.stride_batch + int64_t{row % size} * view.stride_row;
  }

  // How many keys from j on follow each other at stride_row.
  TILEWISE_FN int64_t run(int64_t j, int64_t end) const {
    if (pages == nullptr) return end - j;
    return min(end - j, page_size - (first + j) % page_size);
  }

  // The same keys in a tensor with one row per key of each sequence: gradients of a paged cache.
  TILEWISE_FN KvSource dense(int64_t batch) const { return {nullptr, 0, batch, first}; }
};

}  // namespace tilewise
