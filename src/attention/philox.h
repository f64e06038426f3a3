// Dropout bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
#pragma once

#include "attention/scalar_math.h"
#include "base/math.h"

namespace tilewise {

template <class U>
struct PhiloxState {
  U c0, c1, c2, c3;
};

// U is uint32_t or a vector of them. Without a loop a GPU computes many blocks side by side:
// dropout of the forward on Hopper 50 -> 57 % of the plain form's speed.
template <class Math, class U>
TILEWISE_FN PhiloxState<U> philox4x32_10(PhiloxState<U> c, uint32_t k0, uint32_t k1) {
  TILEWISE_UNROLL
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    Math::mul_high_low(c.c0, 0xD2511F53u, &high0, &low0);
    Math::mul_high_low(c.c2, 0xCD9E8D57u, &high1, &low1);
    c = {high1 ^ c.c1 ^ k0, low1, high0 ^ c.c3 ^ k1, low0};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The dropout decision for one weight depends on (seed, offset, batch, head, row, key) and on
// nothing else: not on tiles, threads, splits or the backend.
//
//   counter = (key / 8, row, batch * heads_q + head, low word of offset)
//   key     = (low word of seed, high word of seed XOR high word of offset)
//   lane    = key % 8: the 16-bit half (lane % 2: 0 low, 1 high) of output word lane / 2
//   kept    when lane value >= threshold = round(p * 65536)
//
// 16 bits resolve p to 1.5e-5 and give 8 decisions per block. `batch` is the index of the sequence,
// `row` and `key` are counted inside it, `head` is the query head.
struct Dropout {
  uint32_t threshold = 0;   // 0: off
  float keep_scale = 1.0f;  // 1 / (1 - p)
  uint32_t key0 = 0;
  uint32_t key1 = 0;
  uint32_t offset = 0;

  static constexpr int64_t kKeysPerBlock = 8;

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

  TILEWISE_FN bool on() const { return threshold != 0; }

  // The eight decisions of keys [8 * key_block, 8 * key_block + 8) as four words of two halves.
  template <class Math, class U>
  TILEWISE_FN PhiloxState<U> block(U key_block, U row, U batch_head) const {
    return philox4x32_10<Math>(PhiloxState<U>{key_block, row, batch_head, U{} + offset}, key0,
                               key1);
  }

  TILEWISE_FN bool kept(int64_t batch_head, int64_t row, int64_t key) const {
    const PhiloxState<uint32_t> bits =
        block<ScalarMath>(static_cast<uint32_t>(key / kKeysPerBlock), static_cast<uint32_t>(row),
                          static_cast<uint32_t>(batch_head));
    const int lane = static_cast<int>(key % kKeysPerBlock);
    const uint32_t pair[4] = {bits.c0, bits.c1, bits.c2, bits.c3};
    return ((pair[lane / 2] >> (16 * (lane % 2))) & 0xffffu) >= threshold;
  }
};

}  // namespace tilewise
