// From S^T and dP^T to P and dS, with the mask, in the registers of a warp.
#pragma once

#include "cuda/common/far_rows.h"
#include "cuda/common/score_mod.h"
#include "cuda/mma_sync/backward_key_tile.cuh"
#include "cuda/ptx/block.h"
#include "cuda/ptx/warp.h"
#include "cuda/tile/fragment.h"

namespace tilewise::cuda::mma_sync {

// S^T or dP^T of a warp: keys 16m + g + 8 (e / 2) in the order of `Sums`, queries 8n + 2t + e % 2.
template <class C>
using ScoreSums = tile::Sums<2, BackwardPlan<C>::kWarpQueries / 8>;

// The band as seen from the keys of a lane: the queries, counted from `row` on, that see them.
template <class C>
class KeyMask {
  using Plan = BackwardPlan<C>;

 public:
  // Key 0 of the lane is key `key` of the CTA.
  TILEWISE_DEVICE KeyMask(const KeyTile<C>& key_tile, int32_t key, int32_t row)
      : first_(key_tile.first_row() + key - row),
        last_(key_tile.last_row() + key - row),
        keys_(key_tile.key_count() - key) {}

  // Whether the key `offset` keys after key 0 of the lane is valid and visible to the query.
  TILEWISE_DEVICE bool visible(int offset, int32_t query) const {
    return offset < keys_ && query >= first_ + offset && query <= last_ + offset;
  }

  // Sets invisible scores to `hidden`. Here the `row` passed to the constructor must be the row of
  // the lane's first query.
  TILEWISE_DEVICE void apply(ScoreSums<C>& s, float hidden) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset = 16 * m + 8 * half;
        const int32_t first = offset < keys_ ? first_ + offset : common::kMaxRow;
#pragma unroll
        for (int n = 0; n < Plan::kWarpQueries / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int query = 8 * n + e;
            if (query < first || query > last_ + offset) s.x[m][n][2 * half + e] = hidden;
          }
        }
      }
    }
  }

 private:
  int32_t first_;
  int32_t last_;
  int32_t keys_;  // number of valid keys from key 0 of the lane on
};

// Loads row_lse or row_delta of the queries 8n + 2t and 8n + 2t + 1.
template <class C>
TILEWISE_DEVICE void load_statistic(float (&x)[2], ptx::SharedAddress statistic, int n) {
  uint32_t bits[2];
  ptx::ld_shared_v2_b32(bits, statistic + static_cast<uint32_t>(n * 32));
  x[0] = ptx::float_of(bits[0]);
  x[1] = ptx::float_of(bits[1]);
}

// Sets the accumulators of dP^T to -delta, so that the product yields dP - delta. The general form
// starts at 0, because it applies dropout to dP first, and so do the column warps that add their
// sums to those of the first.
template <class C>
TILEWISE_DEVICE void start_dp(ScoreSums<C>& dp, ptx::SharedAddress delta, int column_warp) {
  if constexpr (C::kGeneral) {
    dp.fill(0.0f);
  } else {
#pragma unroll
    for (int n = 0; n < BackwardPlan<C>::kWarpQueries / 8; ++n) {
      float d[2];
      load_statistic<C>(d, delta, n);
      if (BackwardPlan<C>::kColumnWarps > 1 && column_warp != 0) d[0] = d[1] = 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp.x[m][n][e] = d[e % 2];
      }
    }
  }
}

// Computes P = exp(S - lse) and dS = P (dP - delta) in place, for the queries 8n .. 8n + 7.
template <class C>
TILEWISE_DEVICE void softmax_and_derivative(ScoreSums<C>& s, ScoreSums<C>& dp, int n,
                                            float scale_log2, ptx::SharedAddress lse) {
  float l[2];
  load_statistic<C>(l, lse, n);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s.x[m][n][e] = ptx::ex2(ptx::fma(s.x[m][n][e], scale_log2, l[e % 2]));
      dp.x[m][n][e] *= s.x[m][n][e];
    }
  }
}

// Scores of far rows become relative to the lse of their row. `first` is the first query of the
// lane among all padded rows.
template <class C>
TILEWISE_DEVICE void make_relative(ScoreSums<C>& s, const BackwardParams& p, int64_t first,
                                   float scale_log2) {
  const float unit = score_of(p.problem).scale;
  const float inverse = common::inverse_scale(scale_log2);
#pragma unroll
  for (int n = 0; n < BackwardPlan<C>::kWarpQueries / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const auto origin = common::RowOrigin::of(p, first + 8 * n + e);
      if (!origin.is_far()) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s.x[i / 2][n][i % 2 * 2 + e];
        x = origin.relative_product(x, unit, inverse);
      }
    }
  }
}

// The general form of P and dS: softcap, ALiBi, bias and dropout.
template <class C>
class GeneralScores {
  using Plan = BackwardPlan<C>;

 public:
  TILEWISE_DEVICE GeneralScores(const Problem& p, const Sequence& s, int64_t head, int64_t key)
      : score_mod_(ScoreMod::of(p)), rows_(static_cast<int32_t>(s.band.rows)), key_(key) {
    start_head(p, s, head);
  }
  TILEWISE_DEVICE void start_head(const Problem& p, const Sequence& s, int64_t head) {
    // After the last head the values read here are not used.
    head_ = ScoreMod::row(p, s, 0, min<int64_t>(head, p.heads_q - 1));
  }

  // All of s becomes dropout(P), and all of dp becomes dS. `row` is the first query of the warp,
  // from which `mask` counts. In the masked form, bit i of the `shown` of lane q says whether query
  // q of the warp sees key i of the warp; other forms do not read it.
  TILEWISE_DEVICE void apply(ScoreSums<C>& s, ScoreSums<C>& dp, const KeyMask<C>& mask,
                             const BackwardParams& p, const KeyTile<C>& key_tile, int32_t row,
                             int32_t tile_index, ptx::SharedAddress lse, ptx::SharedAddress delta,
                             uint32_t shown) const {
    const int64_t bias_stride_row = p.problem.bias_stride_row;
    const bool far = key_tile.far_rows();
    const int64_t first = int64_t{tile_index} * Plan::kQueries + row % Plan::kQueries;
    const int lane = ptx::lane_index();
    uint32_t kept[8];
    if (score_mod_.dropout.on()) draw(kept, row);
#pragma unroll
    for (int n = 0; n < Plan::kWarpQueries / 8; ++n) {
      float l[2];
      float d[2];
      load_statistic<C>(l, lse, n);
      load_statistic<C>(d, delta, n);
      uint32_t keys_shown[2] = {};  // to a query of this lane, from its first key on
      if constexpr (C::kMasked) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          keys_shown[e] = ptx::shuffle(shown, 8 * n + lane % 4 * 2 + e) >> (lane / 4);
      }
      common::RowOrigin origin[2] = {};
      if (far) [[unlikely]] {
        for (int e = 0; e < 2; ++e)
          origin[e] = common::RowOrigin::of(p, first + 8 * n + lane % 4 * 2 + e);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int offset = 16 * m + e / 2 * 8;
          const int32_t from_row = 8 * n + lane % 4 * 2 + e % 2;
          const int32_t query = row + from_row;
          float keep = 1.0f;
          if (score_mod_.dropout.on()) {
            const int drawn_by = e % 2 + m * 2 + n % 2 * 4;
            const uint32_t bit = kept[drawn_by] >> (e / 2 * 8 + n / 2 * 16) & 1u;
            keep = bit != 0 ? score_mod_.dropout.keep_scale : 0.0f;
          }
          const bool is_shown = !C::kMasked || (keys_shown[e % 2] >> offset & 1u) != 0;
          if (query < rows_ && is_shown && mask.visible(offset, from_row)) {
            const auto score =
                score_mod_.at(s.x[m][n][e], row_score_mod(query, bias_stride_row), key_ + offset);
            float value = score.value;
            if (origin[e % 2].is_far()) [[unlikely]]
              value = origin[e % 2].relative(value, 1.0f);
            const float weight = ptx::ex2(ptx::fma(value, kLog2e, l[e % 2]));
            s.x[m][n][e] = weight * keep;
            dp.x[m][n][e] = weight * ptx::fma(dp.x[m][n][e], keep, d[e % 2]) * score.derivative;
          } else {
            s.x[m][n][e] = dp.x[m][n][e] = 0.0f;
          }
        }
      }
    }
  }

 private:
  TILEWISE_DEVICE RowScoreMod row_score_mod(int32_t row, int64_t bias_stride_row) const {
    RowScoreMod r = head_;
    r.diagonal += row;
    r.row = static_cast<uint32_t>(row);
    r.bias += row * bias_stride_row;
    return r;
  }

  // A dropout block is 16 keys of a row, two in each of the 8 lanes of equal t. Per pair of n these
  // lanes hold 8 blocks, one for each combination of (n % 2, m, e % 2), and lane g draws the block
  // of combination g. kept[c] is what lane c has drawn, shifted so that bit 0 is this lane's first
  // key.
  TILEWISE_DEVICE void draw(uint32_t (&kept)[8], int32_t row) const {
    static_assert(Plan::kWarpQueries <= 32);
    const int lane = ptx::lane_index();
    const int g = lane / 4;
    const int t = lane % 4;
    const auto counter = [&](int i) {
      RowScoreMod r = head_;
      r.row = static_cast<uint32_t>(row + 16 * i + g / 4 * 8 + 2 * t + g % 2);
      return score_mod_.dropout_counter(r, key_ - g + g / 2 % 2 * 16);
    };
    const Dropout& dropout = score_mod_.dropout;
    const uint32_t drawn = Plan::kWarpQueries > 16
                               ? dropout.template kept_keys<DeviceMath>(counter(0), counter(1))
                               : dropout.template kept_keys<DeviceMath>(counter(0));
#pragma unroll
    for (int c = 0; c < 8; ++c) kept[c] = ptx::shuffle(drawn, c * 4 + t) >> g;
  }

  ScoreMod score_mod_;
  RowScoreMod head_;  // of row 0
  int32_t rows_;
  int64_t key_;  // of the lane: row g of its warp's 32 keys
};

}  // namespace tilewise::cuda::mma_sync
