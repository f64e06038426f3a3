// Checks of a mask: sizes, pointers and entries.
#include "attention/mask.h"
#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"

namespace tilewise::capi {
namespace {

bool is_ranges(const tilewise_mask& m) { return m.kind == TILEWISE_MASK_RANGES; }

int64_t row_blocks(const tilewise_mask& m) { return ceil_div(m.rows, kMaskBlock); }

int64_t lists_of(const tilewise_mask& m) {
  return is_ranges(m) ? m.batch : m.batch * m.heads * row_blocks(m);
}

void check_sizes(const tilewise_mask& m, const Problem& p) {
  require(m.kind == TILEWISE_MASK_RANGES || m.kind == TILEWISE_MASK_BLOCKS, "mask.kind is ", m.kind,
          ": it must be 1 (ranges) or 2 (blocks)");
  require(m.batch == 1 || m.batch == p.batch, "mask.batch is ", m.batch,
          ": it must be 1 (the same for every sequence) or batch, which is ", p.batch);
  check_range("mask.entry_count", m.entry_count, 0, INT32_MAX);
  if (is_ranges(m)) {
    require(m.heads == 1, "mask.heads is ", m.heads, ": it must be 1 for ranges");
    return;
  }
  require(m.heads == 1 || m.heads == p.heads_q, "mask.heads is ", m.heads,
          ": it must be 1 (the same for every head) or heads_q, which is ", p.heads_q);
  check_range("mask.rows", m.rows, 0, INT32_MAX);
  check_range("mask.keys", m.keys, 0, INT32_MAX);
  check_range("mask.bit_blocks", m.bit_blocks, 0, INT32_MAX);
  check_rows("mask.batch * mask.heads * ceil(mask.rows / 128)", m.batch, m.heads, row_blocks(m));
}

void check_pointer(const char* name, const void* pointer, bool needed) {
  require(!needed || pointer != nullptr, name, " is NULL: an array is needed");
  check_aligned(name, pointer, 4);
}

void check_first(const tilewise_mask& m) {
  const int64_t lists = lists_of(m);
  require(m.first[0] == 0, "mask.first[0] is ", m.first[0], ": it must be 0");
  for (int64_t i = 0; i < lists; ++i) {
    require(m.first[i + 1] >= m.first[i], "mask.first[", i + 1, "] is ", m.first[i + 1],
            ": it must not be less than the entry before it, ", m.first[i]);
  }
  require(m.first[lists] <= m.entry_count, "mask.first[", lists, "] is ", m.first[lists],
          ": it must be at most mask.entry_count, which is ", m.entry_count);
}

// Column c of entry i is between two numbers.
void check_field(const tilewise_mask& m, int64_t fields, int64_t i, int64_t c, int64_t lowest,
                 int64_t highest, const char* what) {
  const int64_t value = m.entries[i * fields + c];
  require(value >= lowest && value <= highest, "mask.entries[", i, ", ", c, "] is ", value, ": ",
          what, " must be ", lowest, " to ", highest);
}

void check_ranges(const tilewise_mask& m) {
  constexpr int64_t kFields = MaskRange::kFields;
  for (int64_t i = 0; i < m.entry_count; ++i) {
    const int32_t* const entry = m.entries + i * kFields;
    check_field(m, kFields, i, 0, 0, INT32_MAX, "row_begin");
    check_field(m, kFields, i, 1, entry[0], INT32_MAX, "row_end");
    check_field(m, kFields, i, 2, 0, INT32_MAX, "key_begin");
    check_field(m, kFields, i, 3, entry[2], INT32_MAX, "key_end");
    check_field(m, kFields, i, 4, TILEWISE_RANGE_FULL, TILEWISE_RANGE_BOTH, "kind");
  }
}

void check_blocks(const tilewise_mask& m) {
  constexpr int64_t kFields = Mask::kBlockFields;
  const int64_t key_blocks = ceil_div(m.keys, kMaskBlock);
  for (int64_t list = 0; list < lists_of(m); ++list) {
    int64_t next = 0;  // blocks of a list ascend
    for (int64_t i = m.first[list]; i < m.first[list + 1]; ++i) {
      const int32_t* const entry = m.entries + i * kFields;
      check_field(m, kFields, i, 0, next, key_blocks, "block_begin");
      const bool full = entry[2] < 0;
      check_field(m, kFields, i, 1, int64_t{entry[0]} + 1,
                  full ? key_blocks : min(key_blocks, int64_t{entry[0]} + 1), "block_end");
      check_field(m, kFields, i, 2, INT32_MIN, m.bit_blocks - 1, "bits");
      next = entry[1];
    }
  }
}

}  // namespace

void check_mask(const Problem& p, Contents contents) {
  check_struct_size(p.mask, "mask");
  check_unknown_bytes(p.mask, "mask");
  const tilewise_mask& m = *p.mask;
  check_sizes(m, p);
  if (contents == Contents::unread) return;
  check_pointer("mask.first", m.first, true);
  check_pointer("mask.entries", m.entries, m.entry_count > 0);
  check_pointer("mask.bits", m.bits, m.bit_blocks > 0 && !is_ranges(m));
  if (contents != Contents::read) return;
  check_first(m);
  if (is_ranges(m)) {
    check_ranges(m);
  } else {
    check_blocks(m);
  }
}

}  // namespace tilewise::capi
