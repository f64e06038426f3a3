// The score_mod of the general form in the backward by keys: softcap, ALiBi, bias and dropout.
//
// If one option is on alone, P is computed beside the dP product, and whatever does not depend on
// the products is computed before them: S starts at its bias or ALiBi term. If several are on,
// everything follows the products.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/common/far_rows.h"
#include "cuda/common/score_mod.h"
#include "cuda/ptx/warp.h"
#include "cuda/wgmma/backward_bias.h"
#include "cuda/wgmma/backward_mask.h"

namespace tilewise::cuda::wgmma {

// The dropout parameters that stay in registers; seed and offset are read where they are used.
struct DropoutFactors {
  uint32_t threshold;  // 0: off
  float scale;

  TILEWISE_DEVICE static DropoutFactors of(const Problem& p) {
    const Dropout dropout = dropout_of(p);
    return {dropout.threshold, dropout.keep_scale};
  }
  TILEWISE_DEVICE Dropout with_seed(const Problem& p) const {
    const uint64_t seed = p.dropout_state != nullptr ? p.dropout_state[0] : p.dropout_seed;
    const uint64_t offset = p.dropout_state != nullptr ? p.dropout_state[1] : p.dropout_offset;
    Dropout dropout = Dropout::make(1.0f, seed, offset);
    dropout.threshold = threshold;
    return dropout.from(p.row_offset, p.key_offset);
  }
};

// Whether dropout keeps a weight, one bit per score of the thread. Score i belongs to key i % 4 / 2
// of the thread's two keys, and to query i % 2 of its two in group i / 4 of eight queries.
struct KeptScores {
  uint32_t word[2];

  TILEWISE_DEVICE bool at(int i) const {
    const int e = i % 4;
    const int group = i / 4;
    const int drawn_by = group % 4 * 2 + e % 2;
    return (word[group / 8] >> (drawn_by + e / 2 * 8 + group / 4 % 2 * 16) & 1u) != 0;
  }

  // The 16 keys of a Philox block belong to the 8 lanes of equal t = lane % 4, two keys each, and
  // these lanes share 8 rows in every four groups of queries. Lane g = lane / 4 of them draws row
  // g % 2 of group g / 2, and the lanes then exchange what they have drawn. `key`: the thread's
  // first key.
  template <int kGroups>
  TILEWISE_DEVICE static KeptScores draw(const Dropout& dropout, int32_t key, int32_t first_row,
                                         uint32_t batch_head) {
    static_assert(kGroups % 8 == 0);
    constexpr int kWords = kGroups / 8;
    const int lane = ptx::lane_index();
    const int g = lane / 4;
    const int t = lane % 4;
    const auto counter = [&](int i) {
      return dropout.counter(static_cast<uint32_t>(key / Dropout::kKeysPerBlock),
                             static_cast<uint32_t>(first_row + 2 * t + g % 2 + g / 2 * 8 + 32 * i),
                             batch_head);
    };
    uint32_t drawn[2];
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      drawn[w] = dropout.template kept_keys<DeviceMath>(counter(2 * w), counter(2 * w + 1));
    KeptScores kept{};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        kept.word[w] |= (ptx::shuffle(drawn[w], c * 4 + t) >> g & 0x01010101u) << c;
    }
    return kept;
  }
};

// The penalty that ALiBi subtracts from S of a query tile, times `unit`: kLog2e for exponents.
template <class C>
class AlibiOfKeys {
 public:
  // `key`: the thread's first key.
  TILEWISE_DEVICE AlibiOfKeys(const Problem& p, const TileDescriptor& work_tile, int32_t key,
                              const RowWalk& walk, float unit = kLog2e)
      : slope_(p.alibi_slopes[work_tile.batch * p.alibi_stride_batch + walk.head] * unit),
        distance_(walk.row + ptx::lane_index() % 4 * 2 + work_tile.shift - key) {}

  TILEWISE_DEVICE float slope() const { return slope_; }
  TILEWISE_DEVICE float distance(int i) const {
    const int32_t d = distance_ + i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
    return static_cast<float>(d < 0 ? -d : d);
  }

 private:
  float slope_;
  int32_t distance_;
};

template <class C>
TILEWISE_DEVICE void pack(const ScoreSums<C>& x, ScoreOperands<C>& half) {
#pragma unroll
  for (int i = 0; i < BackwardPlan<C>::kQueries / 4; ++i)
    half[i / 4][i % 4] = tile::pack<typename C::Element>(x[2 * i], x[2 * i + 1]);
}

// The methods are in the order in which a step calls them.
template <class C, Option kOption>
class BackwardScoreMod {
  using Plan = BackwardPlan<C>;
  static constexpr int kGroups = Plan::kQueries / 8;  // of queries
  // Whether S and dP start at their row statistics (BackwardSums), as far as the option permits it.
  static constexpr bool kPreload = C::kBackward.preload;
  static constexpr bool kStartsAtLse = kPreload && kOption != Option::softcap;
  static constexpr bool kStartsAtDelta = kPreload && kOption != Option::dropout;
  static constexpr bool kStartsAtScoreMod = kOption == Option::bias || kOption == Option::alibi;
  // Stands for the tanh of a masked score: low enough for a weight of 0, and its square, which the
  // derivative contains, is finite.
  static constexpr float kHiddenTanh = -1e19f;

 public:
  static constexpr bool kScoresFromZero = !kStartsAtLse && !kStartsAtScoreMod;
  static constexpr bool kGradientFromZero = !kStartsAtDelta;

  // `key`: the thread's first key, in the CTA. Its other key is 8 further on.
  TILEWISE_DEVICE BackwardScoreMod(const BackwardParams& params, const TileDescriptor& work_tile,
                                   int key)
      : p_(params.problem),
        work_tile_(work_tile),
        key_(work_tile.key + key),
        scale_log2_(exponent_scale(score_of(p_).scale)),
        unit_(max(p_.softcap, 1e-15f) * kLog2e),
        tanh_(score_of(p_).scale * ptx::rcp_approximate(max(p_.softcap, 1e-15f))),
        dropout_(DropoutFactors::of(p_)),
        bias_(p_, work_tile, work_tile.key + key - ptx::lane_index() / 4) {}

  // The factor of dV.
  TILEWISE_DEVICE static float dv_scale(const Problem& p) {
    return kOption == Option::dropout ? dropout_of(p).keep_scale : 1.0f;
  }

  // Issues the loads for a later query tile.
  TILEWISE_DEVICE void prefetch_bias(const RowWalk& walk) {
    if constexpr (kOption == Option::bias) bias_.prefetch(walk.row, walk.head);
  }

  // Initialises the accumulators of both products.
  TILEWISE_DEVICE void init_accumulators(ScoreSums<C>& s, ScoreSums<C>& dp, const RowWalk& walk,
                                         ptx::SharedAddress lse, ptx::SharedAddress delta) {
    const float inverse = ptx::rcp_approximate(scale_log2_);
    if constexpr (kPreload) read_statistics(lse_, lse);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i)
      s[i] = kStartsAtLse ? lse_[i / 4 * 2 + i % 2] * inverse : 0.0f;
    if constexpr (kOption == Option::alibi) {
      const AlibiOfKeys<C> alibi(p_, work_tile_, key_, walk);
      const float slope = alibi.slope() * inverse;
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i] = ptx::fma(alibi.distance(i), -slope, s[i]);
    }
    if constexpr (kOption == Option::bias) {
      const float factor = kLog2e * inverse;
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        const uint32_t pair = bias_.pair(i / 2, i % 2);
        s[2 * i] = ptx::fma(tile::low_of<typename C::Element>(pair), factor, s[2 * i]);
        s[2 * i + 1] = ptx::fma(tile::high_of<typename C::Element>(pair), factor, s[2 * i + 1]);
      }
    }
    if constexpr (!kScoresFromZero) ptx::fence_register(s);
    if constexpr (kStartsAtDelta) {
      float minus_delta[2 * kGroups];
      read_statistics(minus_delta, delta);
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) dp[i] = minus_delta[i / 4 * 2 + i % 2];
      ptx::fence_register(dp);
    }
  }

  // Called beside the products.
  TILEWISE_DEVICE void draw_dropout(const RowWalk& walk) {
    if constexpr (kOption == Option::dropout) {
      Dropout dropout = dropout_.with_seed(p_);
      dropout.key_shift = 0;  // as option_of has found
      kept_ = KeptScores::draw<kGroups>(dropout, key_, walk.row,
                                        dropout_head(p_, work_tile_.batch, walk.head));
    }
  }

  // P from S. `s` becomes P times d score / d (scale S).
  TILEWISE_DEVICE void compute_p(ScoreSums<C>& s, ScoreOperands<C>& p_half, const RowWalk& walk,
                                 const KeyMask<C>& mask, ptx::SharedAddress lse) {
    if constexpr (kOption == Option::softcap) tanh_.apply(s);
    if (mask.touches(walk.row)) {
      ptx::force_branch();
      const float hidden = scale_log2_ > 0.0f ? kMinusInfinity : -kMinusInfinity;
      mask.apply(s, walk.row, kOption == Option::softcap ? kHiddenTanh : hidden);
    }
    if constexpr (kOption == Option::softcap) {
      if constexpr (!kPreload) read_statistics(lse_, lse);
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[2 * i + e];
          p[e] = ptx::ex2(ptx::fma(x, unit_, lse_[i / 2 * 2 + e]));
          x = ptx::fma(-x, x, 1.0f) * p[e];
        }
        p_half[i / 4][i % 4] = tile::pack<typename C::Element>(p[0], p[1]);
      }
    } else {
      softmax<C, kStartsAtLse>(s, p_half, scale_log2_, lse);
    }
    if constexpr (kOption == Option::dropout) {
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i)
        p_half[i / 4][i % 4] = tile::pack<typename C::Element>(
            kept_.at(2 * i) ? s[2 * i] : 0.0f, kept_.at(2 * i + 1) ? s[2 * i + 1] : 0.0f);
    }
  }

  // dS from P and dP.
  TILEWISE_DEVICE void compute_ds(const ScoreSums<C>& p, ScoreSums<C>& dp,
                                  ScoreOperands<C>& ds_half, ptx::SharedAddress delta) const {
    if constexpr (kOption == Option::dropout) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) dp[i] = kept_.at(i) ? dp[i] * dropout_.scale : 0.0f;
    }
    softmax_gradient<C, kStartsAtDelta>(p, dp, ds_half, delta);
  }

 private:
  // Reads the statistics of the thread's queries.
  TILEWISE_DEVICE static void read_statistics(float (&x)[2 * kGroups],
                                              ptx::SharedAddress statistic) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const StatisticPair pair(statistic, j);
      x[2 * j] = pair.x[0];
      x[2 * j + 1] = pair.x[1];
    }
  }

  const Problem& p_;
  const TileDescriptor& work_tile_;
  int32_t key_;  // in the sequence
  float scale_log2_;
  float unit_;  // of a capped score
  HalfMath::ScaledTanh tanh_;
  DropoutFactors dropout_;
  BiasOfKeys<C> bias_;
  KeptScores kept_;
  float lse_[2 * kGroups];
};

template <class C>
class BackwardScoreMod<C, Option::none> {
 public:
  static constexpr bool kScoresFromZero = !BackwardPlan<C>::kPreload;
  static constexpr bool kGradientFromZero = kScoresFromZero;

  TILEWISE_DEVICE BackwardScoreMod(const BackwardParams&, const TileDescriptor&, int) {}
  TILEWISE_DEVICE static float dv_scale(const Problem&) { return 1.0f; }
};

template <class C>
class BackwardScoreMod<C, Option::any> {
  using Plan = BackwardPlan<C>;
  static constexpr int kGroups = Plan::kQueries / 8;  // of queries

 public:
  static constexpr bool kScoresFromZero = false;
  static constexpr bool kGradientFromZero = true;

  // `key`: the thread's first key, in the CTA. Its other key is 8 further on.
  TILEWISE_DEVICE BackwardScoreMod(const BackwardParams& params, const TileDescriptor& work_tile,
                                   int key)
      : work_tile_(work_tile),
        key_(work_tile.key + key),
        far_rows_(common::has_far_rows(params)),
        unit_(far_rows_ ? 1.0f : kLog2e),
        unit_scale_(far_rows_ ? score_of(params.problem).scale
                              : exponent_scale(score_of(params.problem).scale)),
        dropout_(DropoutFactors::of(params.problem)) {}

  TILEWISE_DEVICE static float dv_scale(const Problem&) { return 1.0f; }

  // S starts at the bias if the product is only scaled before the bias is added. The loads then
  // need no registers of their own, and all are in flight together.
  TILEWISE_DEVICE void init_scores(const Problem& p, ScoreSums<C>& s, const RowWalk& walk) const {
#pragma unroll
    for (float& x : s) x = 0.0f;
    if (!starts_at_bias(p)) return;
    const float factor = unit_ / unit_scale_;
    if (p.bias_dtype == TILEWISE_FLOAT32)
      add_bias<float>(p, s, walk, factor);
    else
      add_bias<typename C::Element::Storage>(p, s, walk, factor);
  }

  // P and dS from the products S and dP. Each option makes one pass over the scores, so that its
  // switch is tested once and not once per score.
  TILEWISE_DEVICE void apply(const BackwardParams& params, ScoreSums<C>& s, ScoreSums<C>& dp,
                             ScoreOperands<C>& p_half, ScoreOperands<C>& ds_half,
                             const RowWalk& walk, const KeyMask<C>& mask, ptx::SharedAddress lse,
                             ptx::SharedAddress delta) const {
    const Problem& p = params.problem;
    const float dropout_scale = dropout_.scale;
    KeptScores kept;
    if (dropout_.threshold != 0) {
      kept = KeptScores::draw<kGroups>(dropout_.with_seed(p), key_, walk.row,
                                       dropout_head(p, work_tile_.batch, walk.head));
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) dp[i] = kept.at(i) ? dp[i] * dropout_scale : 0.0f;
    }
    add_statistic(dp, delta);
    cap(p, s, dp);
    if (p.alibi_slopes != nullptr) add_alibi(p, s, walk);
    if (p.bias != nullptr && !starts_at_bias(p)) {
      if (p.bias_dtype == TILEWISE_FLOAT32)
        add_bias<float>(p, s, walk, unit_);
      else
        add_bias<typename C::Element::Storage>(p, s, walk, unit_);
    }
    if (far_rows_) [[unlikely]]
      subtract_origins(params, s, walk);
    add_statistic(s, lse);
    if (mask.touches(walk.row)) mask.apply(s, walk.row, kMinusInfinity);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      s[i] = ptx::ex2(s[i]);
      dp[i] *= s[i];
    }
    if (dropout_.threshold != 0) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i] = kept.at(i) ? s[i] * dropout_scale : 0.0f;
    }
    pack<C>(s, p_half);
    pack<C>(dp, ds_half);
  }

 private:
  TILEWISE_DEVICE static void add_statistic(ScoreSums<C>& x, ptx::SharedAddress statistic) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const StatisticPair y(statistic, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * j + e] += y.x[e % 2];
    }
  }

  // Turns scores in natural units into exponents relative to the origins of their rows.
  TILEWISE_DEVICE void subtract_origins(const BackwardParams& params, ScoreSums<C>& s,
                                        const RowWalk& walk) const {
    const Problem& p = params.problem;
    const bool only_products = p.softcap == 0.0f && p.alibi_slopes == nullptr && p.bias == nullptr;
    const int64_t first = int64_t{walk.index} * Plan::kQueries + ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const auto origin = common::RowOrigin::of(params, first + i / 2 * 8 + i % 2);
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        float& x = s[i / 2 * 4 + key * 2 + i % 2];
        x = origin.is_far() && only_products ? origin.relative_product(x, 1.0f, kLog2e)
                                             : origin.subtracted_from(x) * kLog2e;
      }
    }
  }

  // Turns products into scores times unit_, and dP into the gradient of scale * S.
  TILEWISE_DEVICE void cap(const Problem& p, ScoreSums<C>& s, ScoreSums<C>& dp) const {
    if (p.softcap == 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i] *= unit_scale_;
    } else {
      HalfMath::ScaledTanh(score_of(p).scale * ptx::rcp_approximate(p.softcap)).apply(s);
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        dp[i] *= ptx::fma(-s[i], s[i], 1.0f);
        s[i] *= p.softcap * unit_;
      }
    }
  }

  TILEWISE_DEVICE void add_alibi(const Problem& p, ScoreSums<C>& s, const RowWalk& walk) const {
    const AlibiOfKeys<C> alibi(p, work_tile_, key_, walk, unit_);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) s[i] = ptx::fma(alibi.distance(i), -alibi.slope(), s[i]);
  }

  // The quotient of a bias and the scale may overflow where the bias makes far rows.
  TILEWISE_DEVICE bool starts_at_bias(const Problem& p) const {
    return p.bias != nullptr && p.softcap == 0.0f && !far_rows_;
  }

  // s += factor * bias. The bias has no elements outside of the sequence.
  template <class T>
  TILEWISE_DEVICE void add_bias(const Problem& p, ScoreSums<C>& s, const RowWalk& walk,
                                float factor) const {
    const int32_t row = walk.row + ptx::lane_index() % 4 * 2;
    const T* bias = static_cast<const T*>(p.bias) + work_tile_.batch * p.bias_stride_batch +
                    walk.head * p.bias_stride_head + row * p.bias_stride_row + key_;
    const int32_t rows = work_tile_.rows - row;
    const bool first_key = key_ < work_tile_.keys;
    const bool second_key = key_ + 8 < work_tile_.keys;
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

  const TileDescriptor& work_tile_;
  int32_t key_;       // in the sequence
  bool far_rows_;     // whether the call has any
  float unit_;        // of scores: kLog2e, or 1 with far rows, which need scores as they are
  float unit_scale_;  // scale * unit_
  DropoutFactors dropout_;
};

}  // namespace tilewise::cuda::wgmma
