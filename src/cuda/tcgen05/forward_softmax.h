// The softmax role of the forward: four warps per tile of 128 rows, a row per thread.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/ptx/shared.h"
#include "cuda/tcgen05/forward_shared.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::tcgen05 {

template <class C>
class ForwardSoftmax {
 public:
  using Shared = ForwardShared<C>;
  static constexpr int kKeys = C::kForward.keys;

  // `t`: the tile; `row`: that of the thread in it.
  TILEWISE_DEVICE ForwardSoftmax(const ForwardParams& p, const Shared& shared, int t, int row)
      : shared_(shared),
        t_(t),
        row_(row),
        negative_(score_of(p.problem).scale < 0.0f),
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
    weigh(s);
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before();
    shared_.weights_full(t_).arrive_as_warp();
  }

  TILEWISE_DEVICE ptx::TensorAddress scores() const {
    return shared_.scores(t_) + Shared::lanes_of(row_);
  }

  TILEWISE_DEVICE void load(Scores& s) const {
    uint32_t bits[kParts][kPart];
#pragma unroll
    for (int c = 0; c < kParts; ++c)
      ptx::tcgen05_ld(bits[c], scores() + static_cast<uint32_t>(kPart * c));
    ptx::tcgen05_wait_ld(bits[0], bits[1], bits[2], bits[3]);
    const uint32_t sign = negative_ ? 0x80000000u : 0u;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) s[c][j] = ptx::float_of(bits[c][j] ^ sign);
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

  // Scores become weights, which overwrite the first half of the columns.
  TILEWISE_DEVICE void weigh(const Scores& s) {
    const float shift = max_ == kMinusInfinity ? 0.0f : -max_ * scale_;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      uint32_t words[kPart / 2];
#pragma unroll
      for (int j = 0; j < kPart; j += 2) {
        const float low = ptx::ex2(ptx::fma(s[c][j], scale_, shift));
        const float high = ptx::ex2(ptx::fma(s[c][j + 1], scale_, shift));
        words[j / 2] = tile::pack<typename C::Element>(low, high);
        sums[j % 4] += low;
        sums[j % 4 + 1] += high;
      }
      ptx::tcgen05_st(scores() + static_cast<uint32_t>(kPart / 2 * c), words);
    }
    sum_ += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  const Shared& shared_;
  int t_;
  int row_;
  bool negative_;
  float scale_;  // from scores to powers of two
  int32_t begin_;
  int32_t end_;  // the row sees the keys from begin_ to end_ - 1
  int phase_ = 0;
  float max_ = kMinusInfinity;  // of the scores, as far as the sums know
  float sum_ = 0.0f;
};

}  // namespace tilewise::cuda::tcgen05
