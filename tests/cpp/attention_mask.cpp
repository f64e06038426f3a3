// Mask: its queries agree with each other, and no entry leads outside of its arrays (the builds
// with sanitizers notice).
#include "attention/mask.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace {

using tilewise::Coverage;
using tilewise::Mask;
using tilewise::MaskBits;
using tilewise::Range;

constexpr int64_t kRows = 200, kKeys = 300, kHeads = 2, kBatch = 2;

// Arrays of exactly the stated sizes, with entries that are valid, nearly valid or anything.
struct RandomMask {
  std::vector<int32_t> first, entries;
  std::vector<uint32_t> bits;
  tilewise_mask m{};

  RandomMask(std::mt19937& random, tilewise_mask_kind kind, bool hostile) {
    const auto pick = [&](int64_t low, int64_t high) {
      return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(random));
    };
    const auto any = [&] { return pick(INT32_MIN, INT32_MAX); };
    const bool ranges = kind == TILEWISE_MASK_RANGES;
    m.struct_size = sizeof(m);
    m.kind = kind;
    m.batch = kBatch;
    m.heads = ranges ? 1 : kHeads;
    m.rows = kRows;
    m.keys = kKeys;
    m.bit_blocks = ranges ? 0 : 3;
    const int64_t lists = ranges ? kBatch : kBatch * kHeads * 2;
    first = {0};
    for (int64_t i = 0; i < lists; ++i) {
      int32_t next = 0;
      for (int32_t n = pick(0, 3); n > 0 && next < 3; --n) {
        if (ranges) {
          const int32_t row = pick(0, kRows), key = pick(0, kKeys);
          entries.insert(entries.end(),
                         {row, pick(row, kRows + 40), key, pick(key, kKeys + 40), pick(0, 3)});
          continue;
        }
        const int32_t begin = pick(next, 2);
        const int32_t which = pick(-1, 2);
        next = which < 0 ? pick(begin + 1, 3) : begin + 1;
        entries.insert(entries.end(), {begin, next, which});
      }
      first.push_back(static_cast<int32_t>(entries.size() / (ranges ? 5 : 3)));
    }
    for (int64_t i = 0; i < m.bit_blocks * 128 * 4; ++i)
      bits.push_back(static_cast<uint32_t>(random()));
    if (hostile) {
      for (int32_t& entry : entries)
        if (pick(0, 2) == 0) entry = pick(0, 1) == 0 ? any() : pick(-2, 5);
      for (int32_t& start : first)
        if (pick(0, 3) == 0) start = any();
    }
    entries.shrink_to_fit();
    m.first = first.data();
    m.entries = entries.data();
    m.bits = bits.data();
    m.entry_count = static_cast<int64_t>(entries.size()) / (ranges ? 5 : 3);
  }
};

void expect_consistent(const Mask& mask, Range rows, Range keys) {
  for (int64_t head = 0; head < kHeads; ++head) {
    const Coverage coverage = mask.coverage({head, head + 1}, rows, keys);
    const Range hull = mask.keys_of_any({head, head + 1}, rows);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      std::vector<uint32_t> words(static_cast<std::size_t>((keys.size() + 31) / 32));
      mask.add_bits(head, row, MaskBits{words.data(), 1, keys});
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        const int64_t bit = key - keys.begin;
        const bool visible = mask.shows(head, row, key);
        EXPECT_EQ((words[static_cast<std::size_t>(bit / 32)] >> (bit % 32) & 1u) != 0, visible);
        EXPECT_FALSE(visible && coverage == Coverage::none);
        EXPECT_FALSE(!visible && coverage == Coverage::full);
        EXPECT_FALSE(visible && !hull.contains(key));
      }
    }
  }
}

TEST(Mask, QueriesAgree) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const auto kind = i % 2 == 0 ? TILEWISE_MASK_RANGES : TILEWISE_MASK_BLOCKS;
    const RandomMask given(random, kind, false);
    std::vector<int32_t> storage(static_cast<std::size_t>(given.m.entry_count));
    for (const Range rows : {Range{0, 10}, Range{120, 140}, Range{190, 200}}) {
      for (const Range keys : {Range{0, 64}, Range{70, 200}, Range{256, 310}}) {
        const Mask mask = Mask::of(&given.m, i % kBatch);
        expect_consistent(mask, rows, keys);
        expect_consistent(mask.narrowed(rows, keys, storage.data()), rows, keys);
      }
    }
  }
}

TEST(Mask, EntriesNeverLeadOutside) {
  std::mt19937 random(2);
  for (int i = 0; i < 400; ++i) {
    const auto kind = i % 2 == 0 ? TILEWISE_MASK_RANGES : TILEWISE_MASK_BLOCKS;
    const RandomMask given(random, kind, true);
    std::vector<int32_t> storage(static_cast<std::size_t>(given.m.entry_count));
    const Range rows = {100, 140}, keys = {64, 320};
    const Mask mask = Mask::of(&given.m, i % kBatch).narrowed(rows, keys, storage.data());
    uint32_t words[8] = {};
    for (int64_t row = rows.begin; row < rows.end; ++row)
      mask.add_bits(i % kHeads, row, MaskBits{words, 1, keys});
    mask.coverage({0, kHeads}, rows, keys);
    const Range hull = mask.keys_of_any({0, kHeads}, rows);
    EXPECT_TRUE(hull.empty() || hull.begin < hull.end);
  }
}

}  // namespace
