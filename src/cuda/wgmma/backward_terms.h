// The general form of a step between its products: softcap, ALiBi, bias and dropout.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/common/score_terms.h"
#include "cuda/ptx/warp.h"
#include "cuda/wgmma/backward_mask.h"

namespace tilewise::cuda::wgmma {

template <class C>
class BackwardTerms {
  using Plan = BackwardPlan<C>;
  static constexpr int kGroups = Plan::kQueries / 8;  // of queries

 public:
  // `key`: the thread's first one of the block, the other one is 8 keys on.
  TILEWISE_DEVICE BackwardTerms(const Problem& p, const KeyRecord& work, int key)
      : work_(work), key_(work.key + key) {
    const Dropout dropout = dropout_of(p);
    threshold_ = dropout.threshold;
    keep_scale_ = dropout.keep_scale;
    scale_log2_ = exponent_scale(score_of(p).scale);
  }

  // What S starts at: the bias, where nothing but a factor comes between the two. So its loads need
  // no registers of their own, and are all under way together.
  TILEWISE_DEVICE void preload(const Problem& p, ScoreSums<C>& s, const RowWalk& walk) const {
#pragma unroll
    for (float& x : s) x = 0.0f;
    if (!preloads(p)) return;
    const float factor = kLog2e / scale_log2_;
    if (p.bias_dtype == TILEWISE_FLOAT32)
      add_bias<float>(p, s, walk, factor);
    else
      add_bias<typename C::Element::Storage>(p, s, walk, factor);
  }

  // From the products S and dP to P and dS. One pass over the scores per option, so that a switch
  // is asked once and not once per score.
  TILEWISE_DEVICE void apply(const Problem& p, ScoreSums<C>& s, ScoreSums<C>& dp,
                             ScoreOperands<C>& p_half, ScoreOperands<C>& ds_half,
                             const RowWalk& walk, const KeyMask<C>& mask, ptx::SharedAddress lse,
                             ptx::SharedAddress delta) const {
    const bool drops = threshold_ != 0;
    KeptBits kept;
    if (drops) {
      kept = draw(p, walk);
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) dp[i] = kept.at(i) ? dp[i] * keep_scale_ : 0.0f;
    }
    add_statistic(dp, delta);
    cap(p, s, dp);
    if (p.alibi_slopes != nullptr) add_alibi(p, s, walk);
    if (p.bias != nullptr && !preloads(p)) {
      if (p.bias_dtype == TILEWISE_FLOAT32)
        add_bias<float>(p, s, walk, kLog2e);
      else
        add_bias<typename C::Element::Storage>(p, s, walk, kLog2e);
    }
    add_statistic(s, lse);
    if (mask.touches(walk.row)) mask.apply(s, walk.row, kMinusInfinity);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      s[i] = ptx::ex2(s[i]);
      dp[i] *= s[i];
    }
    if (drops) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i] = kept.at(i) ? s[i] * keep_scale_ : 0.0f;
    }
    pack(s, p_half);
    pack(dp, ds_half);
  }

 private:
  // One bit per score of the thread: score 16 i + c is bit 8 (i % 4) + bit_of(c) of word i / 4.
  struct KeptBits {
    uint32_t word[2];

    // The scores come in eights of two groups of queries: (j % 2, e / 2, e % 2).
    TILEWISE_DEVICE bool at(int i) const {
      const int e = i % 4;
      const int c = e / 2 | e % 2 << 1 | i / 4 % 2 << 2;
      return (word[i / 32] >> (i / 8 % 4 * 8 + c) & 1u) != 0;
    }
  };

  TILEWISE_DEVICE static void add_statistic(ScoreSums<C>& x, ptx::SharedAddress statistic) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const StatisticPair y(statistic, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * j + e] += y.x[e % 2];
    }
  }

  TILEWISE_DEVICE static void pack(const ScoreSums<C>& x, ScoreOperands<C>& half) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i)
      half[i / 4][i % 4] = tile::pack<typename C::Element>(x[2 * i], x[2 * i + 1]);
  }

  // Products become scores in units of log2; dP the gradient of scale * S.
  TILEWISE_DEVICE void cap(const Problem& p, ScoreSums<C>& s, ScoreSums<C>& dp) const {
    if (p.softcap == 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i] *= scale_log2_;
    } else {
      const Score score = score_of(p);
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        const auto capped = score.template cap<HalfMath>(s[i]);
        s[i] = capped.value * kLog2e;
        dp[i] *= capped.derivative;
      }
    }
  }

  TILEWISE_DEVICE void add_alibi(const Problem& p, ScoreSums<C>& s, const RowWalk& walk) const {
    const float slope = p.alibi_slopes[work_.batch * p.alibi_stride_batch + walk.head] * kLog2e;
    const int32_t distance = walk.row + ptx::lane_index() % 4 * 2 + work_.keys - work_.rows - key_;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int32_t d = distance + i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
      s[i] = ptx::fma(static_cast<float>(d < 0 ? -d : d), -slope, s[i]);
    }
  }

  TILEWISE_DEVICE static bool preloads(const Problem& p) {
    return p.bias != nullptr && p.softcap == 0.0f;
  }

  // s += factor * bias. Outside of the sequence bias has no element.
  template <class T>
  TILEWISE_DEVICE void add_bias(const Problem& p, ScoreSums<C>& s, const RowWalk& walk,
                                float factor) const {
    const int32_t row = walk.row + ptx::lane_index() % 4 * 2;
    const T* bias = static_cast<const T*>(p.bias) + work_.batch * p.bias_stride_batch +
                    walk.head * p.bias_stride_head + row * p.bias_stride_row + key_;
    const int32_t rows = work_.rows - row;
    const bool first_key = key_ < work_.keys;
    const bool second_key = key_ + 8 < work_.keys;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int to_row = 8 * j + e;
        const T* const at = bias + to_row * p.bias_stride_row;
        if (to_row < rows && first_key)
          s[4 * j + e] = ptx::fma(to_float(at[0]), factor, s[4 * j + e]);
        if (to_row < rows && second_key)
          s[4 * j + 2 + e] = ptx::fma(to_float(at[8]), factor, s[4 * j + 2 + e]);
      }
    }
  }

  // The 8 keys of a Philox block lie across the 8 lanes of equal t, and so do the 8 combinations of
  // a pair of query groups: (which, e % 2, e / 2). Lane g draws the blocks of combination g for
  // every pair, and the lanes then exchange what they have drawn.
  TILEWISE_DEVICE KeptBits draw(const Problem& p, const RowWalk& walk) const {
    const int lane = ptx::lane_index();
    const int g = lane / 4;
    const int t = lane % 4;
    const auto block = static_cast<uint32_t>(key_ / 8 + g % 2);
    const auto row = static_cast<uint32_t>(walk.row + 2 * t + g / 2 % 2 + g / 4 * 8);
    const auto head = static_cast<uint32_t>(work_.batch * p.heads_q + walk.head);
    const Dropout dropout = words_of(p);
    KeptBits drawn{};
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) {
      const KeepFactors factors{
          dropout.template block<DeviceMath>(block, row + static_cast<uint32_t>(16 * i), head),
          threshold_, 1.0f};
#pragma unroll
      for (int key = 0; key < 8; ++key)
        drawn.word[i / 4] |= (factors.at(key) != 0.0f ? 1u : 0u) << (i % 4 * 8 + key);
    }
    KeptBits kept{};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int w = 0; w < (kGroups + 7) / 8; ++w)
        kept.word[w] |= (ptx::shuffle(drawn.word[w], c * 4 + t) >> g & 0x01010101u) << c;
    }
    return kept;
  }

  // The words that decide, without the factors.
  TILEWISE_DEVICE static Dropout words_of(const Problem& p) {
    const uint64_t seed = p.dropout_state != nullptr ? p.dropout_state[0] : p.dropout_seed;
    const uint64_t offset = p.dropout_state != nullptr ? p.dropout_state[1] : p.dropout_offset;
    return Dropout::make(1.0f, seed, offset);
  }

  const KeyRecord& work_;
  uint32_t threshold_;  // of dropout; 0: off
  float keep_scale_;
  float scale_log2_;
  int32_t key_;  // inside the sequence
};

}  // namespace tilewise::cuda::wgmma
