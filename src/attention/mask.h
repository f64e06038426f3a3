// Which pairs of a row and a key a mask allows: the struct of the C ABI as kernels read it. A pair
// is visible if both the mask and the band allow it.
//
// Entries are never trusted: whatever the arrays contain, every access stays inside them, and
// invalid entries only hide pairs.
#pragma once

#include "attention/band.h"
#include "attention/tile_walk.h"
#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Rows and keys of a block of a mask of blocks, and the 32-bit words of a row of its bits.
inline constexpr int64_t kMaskBlock = 128;
inline constexpr int64_t kMaskWord = 32;
inline constexpr int64_t kMaskRowWords = kMaskBlock / kMaskWord;

// A rectangle of rows and keys, with a band of its own inside: row 0 and key 0 of the band are the
// first ones of the rectangle.
struct MaskRange {
  static constexpr int64_t kFields = 5;
  Range rows;
  Range keys;
  Band band;

  TILEWISE_FN static MaskRange of(const int32_t* entry) {
    const Range rows = {entry[0], entry[1]};
    const Range keys = {entry[2], entry[3]};
    const bool causal = (entry[4] & TILEWISE_RANGE_CAUSAL) != 0;
    const bool inverse = (entry[4] & TILEWISE_RANGE_INVERSE_CAUSAL) != 0;
    // The last row of a causal rectangle sees its last key; the first row of an inverse causal one
    // sees its keys from the first on.
    return {rows, keys,
            Band{.rows = rows.size(),
                 .keys = keys.size(),
                 .left = inverse ? keys.size() - rows.size() : Band::kUnlimited,
                 .right = causal ? 0 : Band::kUnlimited}};
  }

  TILEWISE_FN MaskRange transposed() const { return {keys, rows, band.transposed()}; }

  // The hull of the keys that at least one of the rows sees.
  TILEWISE_FN Range keys_of_any(Range tile) const {
    const Range inside = intersect(tile, rows);
    if (inside.empty()) return {0, 0};
    return placed(band.keys_of_any({inside.begin - rows.begin, inside.end - rows.begin}));
  }
  // Keys that all of the rows see.
  TILEWISE_FN Range keys_of_all(Range tile) const {
    if (tile.begin < rows.begin || tile.end > rows.end) return {0, 0};
    return placed(band.keys_of_all({tile.begin - rows.begin, tile.end - rows.begin}));
  }

 private:
  TILEWISE_FN Range placed(Range local) const {
    return {keys.begin + local.begin, keys.begin + local.end};
  }
};

// Bits of keys: bit i of word w, which is words[w * stride], is key keys.begin + 32 w + i.
struct MaskBits {
  uint32_t* words;
  int64_t stride;
  Range keys;

  TILEWISE_FN bool operator()(Range run) const {
    const Range inside = intersect(run, keys);
    const int64_t end = inside.end - keys.begin;
    for (int64_t bit = inside.begin - keys.begin; bit < end;) {
      const int64_t word = bit / kMaskWord;
      const int64_t word_end = min(end, (word + 1) * kMaskWord);
      words[word * stride] |= ~0u >> (kMaskWord - (word_end - bit)) << (bit % kMaskWord);
      bit = word_end;
    }
    return true;
  }

  // Sets the bits of 32 keys from `key` on.
  TILEWISE_FN void add_word(int64_t key, uint32_t word) const {
    int64_t bit = key - keys.begin;
    if (bit <= -kMaskWord || bit >= keys.size()) return;
    if (bit < 0) word >>= -bit;
    bit = max(bit, int64_t{0});
    const int64_t at = bit / kMaskWord;
    const int64_t shift = bit % kMaskWord;
    words[at * stride] |= word << shift;
    if (shift != 0 && (at + 1) * kMaskWord < keys.size())
      words[(at + 1) * stride] |= word >> (kMaskWord - shift);
  }
};

// The mask of one sequence. `heads` are the query heads that share a tile; a mask that is the same
// for all heads does not look at them.
struct Mask {
  static constexpr int64_t kBlockFields = 3;  // of an entry of a list of blocks

  const tilewise_mask* mask = nullptr;
  int64_t sequence = 0;
  Range entries;                    // the ranges of the sequence
  const int32_t* chosen = nullptr;  // if not null, only the ranges that are listed here
  int64_t chosen_count = 0;

  TILEWISE_FN static Mask of(const tilewise_mask* mask, int64_t batch) {
    Mask m{mask, mask->batch == 1 ? 0 : batch, {}, nullptr, 0};
    if (m.is_ranges()) m.entries = m.list(m.sequence);
    return m;
  }

  TILEWISE_FN bool is_ranges() const { return mask->kind == TILEWISE_MASK_RANGES; }
  TILEWISE_FN bool per_head() const { return mask->heads > 1; }

  // The same mask with only the ranges that touch these rows and keys, which are listed in
  // `storage`: it must have room for all entries of the mask.
  TILEWISE_FN Mask narrowed(Range rows, Range keys, int32_t* storage) const {
    if (!is_ranges()) return *this;
    int64_t count = 0;
    for (int64_t i = 0; i < range_count(); ++i)
      if (touches(i, rows, keys)) storage[count++] = static_cast<int32_t>(entry_of_range(i));
    return with_ranges(storage, count);
  }

  // What `narrowed` consists of, for threads that list the ranges together: the ranges of the
  // sequence, whether one of them touches the rows and keys, and the mask with the listed ones.
  TILEWISE_FN int64_t range_count() const {
    return chosen != nullptr ? chosen_count : entries.size();
  }
  TILEWISE_FN int64_t entry_of_range(int64_t i) const {
    return chosen != nullptr ? chosen[i] : entries.begin + i;
  }
  TILEWISE_FN bool touches(int64_t i, Range rows, Range keys) const {
    return !intersect(range(i).keys_of_any(rows), keys).empty();
  }
  TILEWISE_FN Mask with_ranges(const int32_t* listed, int64_t count) const {
    Mask m = *this;
    m.chosen = listed;
    m.chosen_count = count;
    return m;
  }

  // The hull of the keys that at least one of the rows sees.
  TILEWISE_FN Range keys_of_any(Range heads, Range rows) const {
    Range hull{};
    if (is_ranges()) {
      for (int64_t i = 0; i < range_count(); ++i) hull = joined(hull, range(i).keys_of_any(rows));
      return hull;
    }
    const Range row_blocks = row_blocks_of(rows);
    const Range lists = heads_of_mask(heads);
    for (int64_t head = lists.begin; head < lists.end; ++head) {
      for (int64_t i = row_blocks.begin; i < row_blocks.end; ++i) {
        const Range list = list_of(head, i);
        if (list.empty()) continue;
        const Range keys = {block(list.begin).keys.begin, block(list.end - 1).keys.end};
        hull = joined(hull, intersect(keys, {0, mask->keys}));
      }
    }
    return hull;
  }

  TILEWISE_FN Coverage coverage(Range heads, Range rows, Range keys) const {
    return is_ranges() ? coverage_by_ranges(rows, keys) : coverage_by_blocks(heads, rows, keys);
  }

  // Calls visit(run) for runs of the keys in `within` that the row sees, until it returns false.
  // Runs may overlap.
  template <class Visit>
  TILEWISE_FN void for_runs(int64_t head, int64_t row, Range within, const Visit& visit) const {
    if (is_ranges()) {
      for (int64_t i = 0; i < range_count(); ++i) {
        const Range run = intersect(range(i).keys_of_any({row, row + 1}), within);
        if (!run.empty() && !visit(run)) return;
      }
      return;
    }
    const Range keys = intersect(within, {0, mask->keys});
    if (keys.empty() || row < 0 || row >= mask->rows) return;
    const Range list = list_of(per_head() ? head : 0, row / kMaskBlock);
    for (int64_t i = first_touching(list, keys.begin); i < list.end; ++i) {
      const Block b = block(i);
      if (b.keys.begin >= keys.end) return;
      const Range run = intersect(b.keys, keys);
      if (b.full && !run.empty() && !visit(run)) return;
      for (int64_t key = run.begin; b.bits != nullptr && key < run.end; ++key)
        if (b.sees(row, key) && !visit({key, key + 1})) return;
    }
  }

  // Whether the row sees the key.
  TILEWISE_FN bool shows(int64_t head, int64_t row, int64_t key) const {
    bool shown = false;
    for_runs(head, row, {key, key + 1}, [&](Range) {
      shown = true;
      return false;
    });
    return shown;
  }

  // Sets the bits of the keys that the row sees.
  TILEWISE_FN void add_bits(int64_t head, int64_t row, const MaskBits& to) const {
    if (is_ranges()) return for_runs(head, row, to.keys, to);
    if (row < 0 || row >= mask->rows) return;
    const Range list = list_of(per_head() ? head : 0, row / kMaskBlock);
    for (int64_t i = first_touching(list, to.keys.begin); i < list.end; ++i) {
      const Block b = block(i);
      if (b.keys.begin >= to.keys.end) return;
      if (b.full) to(intersect(b.keys, {0, mask->keys}));
      for (int64_t w = 0; b.bits != nullptr && w < kMaskRowWords; ++w) {
        const int64_t key = b.keys.begin + w * kMaskWord;
        const int64_t exist = clamp(mask->keys - key, 0, kMaskWord);
        if (exist > 0) to.add_word(key, b.word(row, w) & ~0u >> (kMaskWord - exist));
      }
    }
  }

 private:
  // An entry of a list of blocks: consecutive key blocks that are all full, or one partial block.
  struct Block {
    Range keys;
    bool full;
    const uint32_t* bits;  // [row of the block][word]; null unless partial

    TILEWISE_FN bool sees(int64_t row, int64_t key) const {
      const int64_t at = key - keys.begin;
      if (at >= kMaskBlock) return false;  // an invalid entry: the bits of one block for several
      return (word(row, at / kMaskWord) >> (at % kMaskWord) & 1u) != 0;
    }
    // The bits of 32 keys that a row sees.
    TILEWISE_FN uint32_t word(int64_t row, int64_t index) const {
      return bits[row % kMaskBlock * kMaskRowWords + index];
    }
  };
  TILEWISE_FN Block block(int64_t i) const {
    const int32_t* const entry = mask->entries + i * kBlockFields;
    const bool partial = entry[2] >= 0 && entry[2] < mask->bit_blocks;
    return {.keys = {entry[0] * kMaskBlock, entry[1] * kMaskBlock},
            .full = entry[2] < 0,
            .bits = partial ? mask->bits + entry[2] * kMaskBlock * kMaskRowWords : nullptr};
  }

  TILEWISE_FN static Range joined(Range a, Range b) {
    if (a.empty()) return b.empty() ? Range{} : b;
    return b.empty() ? a : Range{min(a.begin, b.begin), max(a.end, b.end)};
  }

  TILEWISE_FN Range list(int64_t index) const {
    return {clamp(mask->first[index], 0, mask->entry_count),
            clamp(mask->first[index + 1], 0, mask->entry_count)};
  }
  // The list of entries of a row block; its index must be below the mask's number of row blocks.
  TILEWISE_FN Range list_of(int64_t head, int64_t row_block) const {
    const int64_t row_blocks = ceil_div(mask->rows, kMaskBlock);
    return list((sequence * mask->heads + head) * row_blocks + row_block);
  }
  TILEWISE_FN Range heads_of_mask(Range heads) const { return per_head() ? heads : Range{0, 1}; }
  TILEWISE_FN Range row_blocks_of(Range rows) const {
    const Range inside = intersect(rows, {0, mask->rows});
    if (inside.empty()) return {};
    return {inside.begin / kMaskBlock, ceil_div(inside.end, kMaskBlock)};
  }

  // The first block of a list that ends after `key`.
  TILEWISE_FN int64_t first_touching(Range list, int64_t key) const {
    int64_t low = list.begin;
    for (int64_t high = list.end; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (block(middle).keys.end <= key)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  TILEWISE_FN MaskRange range(int64_t i) const {
    return MaskRange::of(mask->entries + entry_of_range(i) * MaskRange::kFields);
  }

  TILEWISE_FN Coverage coverage_by_ranges(Range rows, Range keys) const {
    Coverage result = Coverage::none;
    for (int64_t i = 0; i < range_count(); ++i) {
      const MaskRange r = range(i);
      if (intersect(r.keys_of_any(rows), keys).empty()) continue;
      const Range all = r.keys_of_all(rows);
      if (all.begin <= keys.begin && keys.end <= all.end) return Coverage::full;
      result = Coverage::partial;
    }
    return result;
  }

  TILEWISE_FN Coverage coverage_by_blocks(Range heads, Range rows, Range keys) const {
    const Range inside = intersect(keys, {0, mask->keys});
    if (inside.empty()) return Coverage::none;
    const Range row_blocks = row_blocks_of(rows);
    const Range lists = heads_of_mask(heads);
    bool any = false;
    bool all = inside.end == keys.end && rows.end <= mask->rows;
    for (int64_t head = lists.begin; head < lists.end; ++head) {
      for (int64_t i = row_blocks.begin; i < row_blocks.end; ++i) {
        const Range list = list_of(head, i);
        int64_t covered = inside.begin;  // the keys before this one are in full blocks
        for (int64_t at = first_touching(list, inside.begin); at < list.end; ++at) {
          const Block b = block(at);
          if (b.keys.begin >= inside.end) break;
          any = true;
          if (b.full && b.keys.begin <= covered) covered = max(covered, b.keys.end);
        }
        all = all && covered >= inside.end;
      }
    }
    return !any ? Coverage::none : all ? Coverage::full : Coverage::partial;
  }
};

}  // namespace tilewise
