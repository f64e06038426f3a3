// The softmax role of the forward: four warps per tile of 128 rows, a row per thread.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/ptx/float_pair.h"
#include "cuda/ptx/shared.h"
#include "cuda/tcgen05/forward_shared.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tcgen05 {

// 2^x for x below 2^7, without the special function unit, which has a quarter of the throughput of
// the multiplications: x = n + f with |f| <= 1/2, and 2^f is a polynomial (our fit; relative error
// 1.0e-4, where a weight is rounded to 2.4e-4 in fp16). 0 for x <= -127; NaN becomes a number that
// fp16 and bf16 round to infinity, which marks the row.
TILEWISE_DEVICE void exp2_by_polynomial(ptx::FloatPair& x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it leaves n in the low bits
  constexpr ptx::FloatPair kMagics = {kMagic, kMagic};
  constexpr ptx::FloatPair kOnes = {1.0f, 1.0f};
  constexpr ptx::FloatPair kFirst = {0.6932829022f, 0.6932829022f};
  constexpr ptx::FloatPair kSecond = {0.2422109693f, 0.2422109693f};
  constexpr ptx::FloatPair kThird = {0.0550089292f, 0.0550089292f};
  for (float& each : x) each = ptx::fmax_nan(each, -127.0f);
  ptx::FloatPair n, f, y;
  ptx::add_f32x2(n, x, kMagics);
  ptx::sub_f32x2(f, n, kMagics);
  ptx::sub_f32x2(f, x, f);
  ptx::fma_f32x2(y, f, kThird, kSecond);
  ptx::fma_f32x2(y, y, f, kFirst);
  ptx::fma_f32x2(y, y, f, kOnes);
  for (int i = 0; i < 2; ++i) x[i] = ptx::float_of((ptx::bits_of(n[i]) << 23) + ptx::bits_of(y[i]));
}

template <class C>
class ForwardSoftmax {
 public:
  using Shared = ForwardShared<C>;
  static constexpr int kKeys = C::kForward.keys;

  // `t`: the tile; `row`: that of the thread in it.
  TILEWISE_DEVICE ForwardSoftmax(const ForwardParams& p, const Shared& shared, int t, int row)
      : shared_{ptx::opaque(shared.base)},
        t_(t),
        row_(row),
        scores_(shared.scores(t) + Shared::lanes_of(row)),
        scale_(positive_scale(score_of(p.problem).scale) * kLog2e) {
    const KeyTiles& tiles = shared.work_tile().tiles;
    const int32_t work_row = t * Shared::kRows + row;
    begin_ = tiles.lower + work_row;
    end_ = min(tiles.keys, tiles.upper + work_row);
  }

  TILEWISE_DEVICE void run() {
    const KeyTiles tiles = shared_.work_tile().tiles;
#pragma unroll 1
    for (int32_t tile = tiles.last; tile >= tiles.first; --tile) {
      if (tiles.masked(tile))
        step<true>(tile, tile == tiles.last);
      else
        step<false>(tile, tile == tiles.last);
    }
    const float m = max_ == kMinusInfinity ? kNoKey : max_ * scale_;
    ptx::st_shared_b32(shared_.row_m(t_, row_), ptx::bits_of(m));
    ptx::st_shared_b32(shared_.row_l(t_, row_), ptx::bits_of(sum_));
    shared_.rows_full(t_).arrive_as_warp();
  }

 private:
  static constexpr int kPart = 32;  // scores that are loaded together
  // One pair of eight in tiles without a mask: 16 of 128 weights, as in FlashAttention-4.
  static constexpr int kPolynomialPairs = 1;
  static constexpr int kParts = kKeys / kPart;
  using Scores = float[kParts][kPart];

  template <bool kMasked>
  TILEWISE_DEVICE void step(int32_t tile, bool first) {
    shared_.scores_full(t_).wait(phase_);
    phase_ ^= 1;
    ptx::tcgen05_fence_after();
    Scores s;
    load(s);
    if (kMasked) mask(s, tile * kKeys);
    raise_maximum(s, first);
    weigh<kMasked ? 0 : kPolynomialPairs>(s);
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before();
    shared_.weights_full(t_).arrive_as_warp();
  }

  TILEWISE_DEVICE void load(Scores& s) const {
    uint32_t bits[kParts][kPart];
#pragma unroll
    for (int c = 0; c < kParts; ++c)
      ptx::tcgen05_ld(bits[c], scores_ + static_cast<uint32_t>(kPart * c));
    ptx::tcgen05_wait_ld(bits[0], bits[1], bits[2], bits[3]);
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) s[c][j] = ptx::float_of(bits[c][j]);
    }
  }

  TILEWISE_DEVICE void mask(Scores& s, int32_t first_key) const {
    const int32_t begin = begin_ - first_key;
    const int32_t end = end_ - first_key;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int key = kPart * c + j;
        if (key < begin || key >= end) s[c][j] = kMinusInfinity;
      }
    }
  }

  // The sums keep their maximum until it has grown by a factor of 2^8: weights stay below that,
  // which fp16 can hold, and most steps scale nothing.
  TILEWISE_DEVICE void raise_maximum(const Scores& s, bool first) {
    constexpr float kGrown = 8.0f;
    float highest = kMinusInfinity;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) highest = ptx::fmax(highest, s[c][j]);
    }
    if (first) {
      max_ = highest;
      return;
    }
    float factor = 1.0f;
    const float grown = (highest - max_) * scale_;  // NaN if the row has seen no key
    if (grown > kGrown) {
      factor = ptx::ex2(-grown);
      max_ = highest;
      sum_ *= factor;
    }
    ptx::st_shared_b32(shared_.factor(t_, row_), ptx::bits_of(factor));
    shared_.factors_full(t_).arrive_as_warp();
  }

  // Scores become weights, which overwrite the first half of the columns. `kPolynomials` of each
  // eight pairs are computed by multiplications.
  template <int kPolynomials>
  TILEWISE_DEVICE void weigh(const Scores& s) {
    const float shift = max_ == kMinusInfinity ? 0.0f : -max_ * scale_;
    const ptx::FloatPair scales = {scale_, scale_};
    const ptx::FloatPair shifts = {shift, shift};
    ptx::FloatPair sums[2] = {};
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      uint32_t words[kPart / 2];
#pragma unroll
      for (int j = 0; j < kPart; j += 2) {
        ptx::FloatPair x = {s[c][j], s[c][j + 1]};
        ptx::fma_f32x2(x, x, scales, shifts);
        if (j / 2 % 8 < kPolynomials) {
          exp2_by_polynomial(x);
        } else {
          for (float& y : x) y = ptx::ex2(y);
        }
        words[j / 2] = tile::pack<typename C::Element>(x[0], x[1]);
        ptx::add_f32x2(sums[j / 2 % 2], sums[j / 2 % 2], x);
      }
      ptx::tcgen05_st(scores_ + static_cast<uint32_t>(kPart / 2 * c), words);
    }
    sum_ += (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]);
  }

  Shared shared_;  // by an opaque address, which ptxas would compute anew at each use
  int t_;
  int row_;
  ptx::TensorAddress scores_;  // those of the lanes of the warp; read once from shared memory
  float scale_;                // from scores to powers of two
  int32_t begin_;
  int32_t end_;  // the row sees the keys from begin_ to end_ - 1
  int phase_ = 0;
  float max_ = kMinusInfinity;  // of the scores, as far as the sums know
  float sum_ = 0.0f;
};

}  // namespace tilewise::cuda::tcgen05
