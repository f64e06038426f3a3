// Dropout bits: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC11), the fewest that pass all tests of that paper.
#pragma once

#include "attention/scalar_math.h"
#include "base/math.h"

namespace tilewise {

template <class U>
struct PhiloxState {
  U c0, c1, c2, c3;
};

// U is uint32_t or a vector of them. Unrolled, a GPU computes many blocks in parallel.
template <class Math, int kRounds, class U>
TILEWISE_FN PhiloxState<U> philox4x32(PhiloxState<U> c, uint32_t k0, uint32_t k1) {
  TILEWISE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    U high0, low0, high1, low1;
    Math::mul_high_low(c.c0, 0xD2511F53u, &high0, &low0);
    Math::mul_high_low(c.c2, 0xCD9E8D57u, &high1, &low1);
    c = {high1 ^ (c.c1 ^ k0), low1, high0 ^ (c.c3 ^ k1), low0};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The dropout decision for one weight depends on (seed, offset, batch, head, row, key) and on
// nothing else: not on tiles, threads, splits or the backend.
//
//  Philox counter = (key / 16, row, batch * heads + head, low word of offset)
//  Philox key     = (low word of seed, high word of seed XOR high word of offset)
//  halves         = the eight 16-bit halves of a Philox block, the low half of each word first
//  number         = for key j of the 16: bit 8 + i is bit j of half i, and bit i is bit (j XOR 8)
//                   of half i
//  kept           when number >= threshold = round(p * 65536)
//
// All 16 keys are compared at once, bit by bit, at the cost of 8 random bits per key, and p is
// still resolved to 1.5e-5. The lower byte of the number of key j is the upper byte of that of key
// j XOR 8; it decides only once in 256 times, so the decisions for these two keys are correlated by
// less than 1/80 (for p below 1/256, by 1 / (65536 p); docs/decisions/018). `batch` is the index of
// the sequence, `row` and `key` are counted within it, `head` is the query head and `heads` their
// number. All of them are those of the whole problem: a shard of it (`from`) gives its own rows and
// keys to the functions below.
struct Dropout {
  uint32_t threshold = 0;   // 0: off
  float keep_scale = 1.0f;  // 1 / (1 - p)
  uint32_t key0 = 0;
  uint32_t key1 = 0;
  uint32_t offset = 0;
  // Row 0 and key 0 of a shard: key 0 is key `key_shift` of block `key_block`.
  uint32_t row = 0;
  uint32_t key_block = 0;
  uint32_t key_shift = 0;

  static constexpr int32_t kKeysPerBlock = 16;

  TILEWISE_FN static Dropout make(float p, uint64_t seed, uint64_t offset) {
    Dropout d;
    if (p <= 0.0f) return d;
    d.threshold = static_cast<uint32_t>(static_cast<double>(p) * 65536.0 + 0.5);
    d.keep_scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
    d.key0 = static_cast<uint32_t>(seed);
    d.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
    d.offset = static_cast<uint32_t>(offset);
    return d;
  }

  // The same decisions for a shard whose row 0 and key 0 are these ones of the whole problem.
  TILEWISE_FN Dropout from(int64_t first_row, int64_t first_key) const {
    Dropout d = *this;
    d.row = static_cast<uint32_t>(first_row);
    d.key_block = static_cast<uint32_t>(first_key / kKeysPerBlock);
    d.key_shift = static_cast<uint32_t>(first_key % kKeysPerBlock);
    return d;
  }

  TILEWISE_FN bool on() const { return threshold != 0; }

  // The counter for keys [16 * block, 16 * block + 16).
  template <class U>
  TILEWISE_FN PhiloxState<U> counter(U block, U query, U batch_head) const {
    return {block + key_block, query + row, batch_head, U{} + offset};
  }

  // Bit j is set if key j of the block is kept. Requires that dropout is on. With a key_shift the
  // keys belong to two blocks of the whole problem.
  template <class Math, class U>
  TILEWISE_FN U kept_keys(const PhiloxState<U>& counter) const {
    const U kept = kept_of_block<Math>(counter);
    if (key_shift == 0) return kept;
    return (kept >> key_shift | kept_of_block<Math>(next(counter)) << (16 - key_shift)) & 0xffffu;
  }

  // The same for two blocks in little more than the time of one; the bits of the second are 16
  // higher.
  template <class Math>
  TILEWISE_FN uint32_t kept_keys(const PhiloxState<uint32_t>& first,
                                 const PhiloxState<uint32_t>& second) const {
    if (key_shift == 0) return kept_of_blocks<Math>(first, second);
    return (kept_of_blocks<Math>(first, next(first)) >> key_shift & 0xffffu) |
           kept_of_blocks<Math>(second, next(second)) >> key_shift << 16;
  }

  TILEWISE_FN bool kept(int64_t batch_head, int64_t query, int64_t key) const {
    const auto block = static_cast<uint32_t>(key / kKeysPerBlock);
    const auto bits = kept_keys<ScalarMath>(
        counter(block, static_cast<uint32_t>(query), static_cast<uint32_t>(batch_head)));
    return (bits >> (key % kKeysPerBlock) & 1u) != 0;
  }

 private:
  // The counter of the block after that of `c`.
  template <class U>
  TILEWISE_FN static PhiloxState<U> next(const PhiloxState<U>& c) {
    return {c.c0 + 1, c.c1, c.c2, c.c3};
  }

  template <class Math, class U>
  TILEWISE_FN U kept_of_block(const PhiloxState<U>& counter) const {
    const PhiloxState<U> c = philox4x32<Math, 7>(counter, key0, key1);
    const U half[8] = {c.c0, c.c0 >> 16, c.c1, c.c1 >> 16, c.c2, c.c2 >> 16, c.c3, c.c3 >> 16};
    return at_least_threshold<Math>(half) & 0xffffu;
  }
  template <class Math>
  TILEWISE_FN uint32_t kept_of_blocks(const PhiloxState<uint32_t>& first,
                                      const PhiloxState<uint32_t>& second) const {
    const auto a = philox4x32<Math, 7>(first, key0, key1);
    const auto b = philox4x32<Math, 7>(second, key0, key1);
    const uint32_t half[8] = {Math::low_halves(a.c0, b.c0), Math::high_halves(a.c0, b.c0),
                              Math::low_halves(a.c1, b.c1), Math::high_halves(a.c1, b.c1),
                              Math::low_halves(a.c2, b.c2), Math::high_halves(a.c2, b.c2),
                              Math::low_halves(a.c3, b.c3), Math::high_halves(a.c3, b.c3)};
    return at_least_threshold<Math>(half);
  }

  // A number exceeds threshold - 1 if it is larger in the highest bit in which the two differ. From
  // the lowest bit upwards: where threshold - 1 has a 1, `above` stays true only if the number has
  // a 1 as well; where it has a 0, either is enough.
  template <class Math, class U>
  TILEWISE_FN U at_least_threshold(const U (&half)[8]) const {
    U above{};
    TILEWISE_UNROLL
    for (int i = 0; i < 8; ++i) above = two_of_three(half[i], above, clear_bit(i));
    above = Math::swap_bytes_of_halves(above);
    TILEWISE_UNROLL
    for (int i = 0; i < 8; ++i) above = two_of_three(half[i], above, clear_bit(8 + i));
    return above;
  }
  // All bits set if bit i of threshold - 1 is clear.
  TILEWISE_FN uint32_t clear_bit(int i) const { return ((threshold - 1) >> i & 1u) - 1; }

  template <class U>
  TILEWISE_FN static U two_of_three(U a, U b, uint32_t c) {
    return (a & b) | ((a | b) & c);
  }
};

}  // namespace tilewise
