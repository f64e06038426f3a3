// Where key j of a sequence lies in memory: strided, variable length or paged.
#pragma once

#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Keys are counted within the sequence, after any left padding. k and v share the geometry and
// differ only in their strides, so one source serves both, and also their gradients (`dense`).
struct KvSource {
  const int32_t* pages = nullptr;  // block table row of this sequence; null: not paged
  int64_t page_size = 0;
  int64_t batch_index = 0;  // index along stride_batch
  int64_t first = 0;        // rows before key 0
  uint32_t last_page = 0;   // of k and v: the largest valid entry of `pages`

  // The page of entry i of the table, clamped to the last page if the entry is invalid.
  TILEWISE_FN uint32_t page(int64_t i) const {
    return min(static_cast<uint32_t>(pages[i]), last_page);
  }

  // Entries of the table that hold `keys`; empty without a table.
  TILEWISE_FN Range entries(Range keys) const {
    if (pages == nullptr || keys.empty()) return {};
    return {(first + keys.begin) / page_size, (first + keys.end - 1) / page_size + 1};
  }

  // Offset in elements of head 0 and column 0 of key j in `view`.
  TILEWISE_FN int64_t offset(const tilewise_tensor& view, int64_t j) const {
    const int64_t row = first + j;
    if (pages == nullptr) return batch_index * view.stride_batch + row * view.stride_row;
    return page(row / page_size) * view.stride_batch + (row % page_size) * view.stride_row;
  }

  // The same for fewer than 2^31 rows. On a GPU a 64-bit division is a slow function call.
  TILEWISE_FN int64_t offset_32(const tilewise_tensor& view, int32_t j) const {
    if (pages == nullptr) return offset(view, j);
    const auto row = static_cast<uint32_t>(first + j);
    const auto size = static_cast<uint32_t>(page_size);
    return page(row / size) * view.stride_batch + int64_t{row % size} * view.stride_row;
  }

  // How many keys from j on lie at consecutive rows.
  TILEWISE_FN int64_t run(int64_t j, int64_t end) const {
    if (pages == nullptr) return end - j;
    return min(end - j, page_size - (first + j) % page_size);
  }

  // The same keys in a tensor with one row per key of each sequence, as the gradients of a paged
  // cache have.
  TILEWISE_FN KvSource dense(int64_t batch) const { return {nullptr, 0, batch, first}; }
};

}  // namespace tilewise
