// P and dS from S and dP in the backward by columns: warpgroup 0 stores P, warpgroup 1 reads it and
// stores dS, both as tiles [key][query].
//
// With g = lane / 4 and t = lane % 4, value 4 j + e of a thread belongs to
//
//   query  16 warp + g + 8 (e / 2)    of the query tile
//   key    8 j + 2 t + e % 2          of the CTA
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/common/far_rows.h"
#include "cuda/common/score_mod.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/fragment.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

// The statistics of the two queries of a thread.
struct RowStatistic {
  float x[2];
};

// The keys that the two queries of a thread see, counted from the thread's first key.
struct KeyRange {
  int32_t begin[2];
  uint32_t count[2];

  TILEWISE_DEVICE KeyRange(const TileDescriptor& work_tile, int32_t row) {
    const int32_t key = work_tile.key + ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t first = max(0, row + 8 * half + work_tile.low);
      const int32_t end = min(work_tile.keys, row + 8 * half + work_tile.high + 1);
      begin[half] = first - key;
      count[half] = static_cast<uint32_t>(max(0, end - first));
    }
  }
  TILEWISE_DEVICE bool contains(int half, int key) const {
    return static_cast<uint32_t>(key) - static_cast<uint32_t>(begin[half]) < count[half];
  }
};

template <class C>
class ColumnScores {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  static constexpr int kChunks = Plan::kKeys / 16;

 public:
  TILEWISE_DEVICE ColumnScores(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                               ptx::SharedAddress shared, int warp)
      : work_tile_(work_tile),
        shared_(shared),
        row_(warp * 16 + ptx::lane_index() / 4),
        unmasked_(unmasked_rows(work_tile)),
        scale_log2_(exponent_scale(score_of(p.problem).scale)),
        dropout_scale_(C::kGeneral ? dropout_of(p.problem).keep_scale : 1.0f) {
    if constexpr (C::kGeneral) far_rows_ = common::has_far_rows(p);
    const int lane = ptx::lane_index();
    at_ = static_cast<uint32_t>(
        Plan::ScoreTile::chunk_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
  }

  // lse for warpgroup 0, delta for warpgroup 1.
  template <int kWarpgroup>
  TILEWISE_DEVICE RowStatistic statistic(int stage) const {
    const ptx::SharedAddress at =
        shared_ +
        static_cast<uint32_t>(
            (kWarpgroup == 0 ? Plan::kLse + stage * Plan::kStatisticBytes : Plan::kDelta) +
            row_ * 4);
    return {ptx::float_of(ptx::ld_shared_b32(at)), ptx::float_of(ptx::ld_shared_b32(at + 32))};
  }

  // P = exp(S - lse)
  TILEWISE_DEVICE void store_p(const BackwardParams& p, float (&s)[Plan::kKeys / 2],
                               const RowStatistic& lse, const RowWalk& walk, int stage) const {
    if constexpr (C::kGeneral) {
      store_general(p, s, lse, walk, stage);
    } else {
      if (!unmasked_.contains(walk.row)) {
        ptx::force_branch();
        const KeyRange seen(work_tile_, walk.row + row_);
        const float hidden = scale_log2_ > 0.0f ? kMinusInfinity : -kMinusInfinity;
#pragma unroll
        for (int i = 0; i < Plan::kKeys / 2; ++i)
          if (!seen.contains(i / 2 % 2, i / 4 * 8 + i % 2)) s[i] = hidden;
      }
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          r[i] = tile::pack<Element>(
              ptx::ex2(ptx::fma(s[8 * k + 2 * i], scale_log2_, lse.x[i % 2])),
              ptx::ex2(ptx::fma(s[8 * k + 2 * i + 1], scale_log2_, lse.x[i % 2])));
        ptx::stmatrix_x4_trans(at(Plan::kP, stage, k), r);
      }
    }
    ptx::fence_proxy_async();
  }

  // dS = P (dP - delta)
  TILEWISE_DEVICE void store_ds(const float (&dp)[Plan::kKeys / 2], const RowStatistic& delta,
                                int stage) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      uint32_t p[4];
      uint32_t ds[4];
      ptx::ldmatrix_x4_trans(p, at(Plan::kP, stage, k));
      if constexpr (C::kGeneral) ptx::ldmatrix_x4_trans(ds, at(Plan::kDs, stage, k));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[2] = {dp[8 * k + 2 * i], dp[8 * k + 2 * i + 1]};
        uint32_t factor = p[i];
        if constexpr (C::kGeneral) {
          // P is 0 where dropout has dropped the weight.
          factor = ds[i];
          x[0] = (p[i] & 0x7fffu) != 0 ? x[0] * dropout_scale_ : 0.0f;
          x[1] = (p[i] & 0x7fff0000u) != 0 ? x[1] * dropout_scale_ : 0.0f;
        }
        ds[i] = tile::pack<Element>(tile::low_of<Element>(factor) * (x[0] + delta.x[i % 2]),
                                    tile::high_of<Element>(factor) * (x[1] + delta.x[i % 2]));
      }
      if constexpr (C::kGeneral) ptx::sync_warp();
      ptx::stmatrix_x4_trans(at(Plan::kDs, stage, k), ds);
    }
    ptx::fence_proxy_async();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int tiles, int stage, int chunk) const {
    return shared_ + at_ +
           static_cast<uint32_t>(tiles + stage % Plan::kScoreStages * Plan::ScoreTile::kBytes +
                                 chunk * 16 * tile::kSwizzledRowBytes);
  }
  // store_p with options: stores P, and P times d score / d (scale S) where dS will be. It takes
  // 16 keys at a time, so that the derivatives need few registers.
  TILEWISE_DEVICE void store_general(const BackwardParams& params, float (&s)[Plan::kKeys / 2],
                                     const RowStatistic& lse, const RowWalk& walk,
                                     int stage) const {
    const Problem& p = params.problem;
    const ScoreMod score_mod = ScoreMod::of(p);
    const bool masked = !unmasked_.contains(walk.row);
    const int32_t row = walk.row + row_;
    const KeyRange seen(work_tile_, row);
    const RowScoreMod row_score_mod = ScoreMod::row(p, sequence(), row, walk.head);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int32_t key = work_tile_.key + 16 * k;
      float x[8];
      float derivative[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto capped = score_mod.score.template cap<HalfMath>(s[8 * k + i]);
        x[i] = capped.value;
        derivative[i] = capped.derivative;
      }
      if (p.alibi_slopes != nullptr) add_alibi(x, row_score_mod, key);
      if (p.bias != nullptr) {
        if (p.bias_dtype == TILEWISE_FLOAT32)
          add_bias<float>(x, p, row_score_mod, row, key);
        else
          add_bias<typename Element::Storage>(x, p, row_score_mod, row, key);
      }
      if (far_rows_) [[unlikely]] {
        const int64_t padded_row = int64_t{walk.index} * Plan::kQueries + row_;
        const common::RowOrigin origin[2] = {common::RowOrigin::of(params, padded_row),
                                             common::RowOrigin::of(params, padded_row + 8)};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = origin[i / 2 % 2].subtracted_from(x[i]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = ptx::ex2(ptx::fma(x[i], kLog2e, lse.x[i / 2 % 2]));
        if (masked && !seen.contains(i / 2 % 2, 16 * k + i / 4 * 8 + i % 2)) x[i] = 0.0f;
        derivative[i] *= x[i];
      }
      if (score_mod.dropout.on()) apply_dropout(x, score_mod.dropout, row_score_mod, key);
      store_chunk(x, at(Plan::kP, stage, k));
      store_chunk(derivative, at(Plan::kDs, stage, k));
    }
  }

  // The fields of the sequence that the score_mod of a row needs.
  TILEWISE_DEVICE Sequence sequence() const {
    Sequence s{};
    s.batch = work_tile_.batch;
    s.band.rows = work_tile_.rows;
    s.band.keys = work_tile_.keys;
    s.band.diagonal = work_tile_.shift - (work_tile_.keys - work_tile_.rows);
    return s;
  }

  TILEWISE_DEVICE static void store_chunk(const float (&x)[8], ptx::SharedAddress to) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = tile::pack<Element>(x[2 * i], x[2 * i + 1]);
    ptx::stmatrix_x4_trans(to, r);
  }

  // Value i of a chunk belongs to the thread's query (i / 2) % 2 and to the key
  // `key` + 8 (i / 4) + 2 t + i % 2.
  TILEWISE_DEVICE static void add_alibi(float (&x)[8], const RowScoreMod& row, int32_t key) {
    const int32_t distance = row.diagonal - key - ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t d = distance + i / 2 % 2 * 8 - i / 4 * 8 - i % 2;
      x[i] = ptx::fma(static_cast<float>(d < 0 ? -d : d), -row.slope, x[i]);
    }
  }

  // The bias has no elements outside of the sequence.
  template <class T>
  TILEWISE_DEVICE void add_bias(float (&x)[8], const Problem& p, const RowScoreMod& score_mod,
                                int32_t row, int32_t key) const {
    const int32_t first_key = key + ptx::lane_index() % 4 * 2;
    const T* bias = static_cast<const T*>(p.bias) + score_mod.bias + first_key;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int to_row = i / 2 % 2 * 8;
      const int to_key = i / 4 * 8 + i % 2;
      if (row + to_row < work_tile_.rows && first_key + to_key < work_tile_.keys)
        x[i] += to_float(bias[to_row * p.bias_stride_row + to_key]);
    }
  }

  // The four lanes of a row share 16 keys. Even lanes draw the bits of the first of their two rows,
  // odd lanes those of the second.
  TILEWISE_DEVICE static void apply_dropout(float (&x)[8], const Dropout& dropout,
                                            const RowScoreMod& row, int32_t key) {
    const int t = ptx::lane_index() % 4;
    const uint32_t drawn = dropout.template kept_keys<DeviceMath>(
        dropout.counter(static_cast<uint32_t>(key / Dropout::kKeysPerBlock),
                        row.row + static_cast<uint32_t>(t % 2 * 8), row.batch_head));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t kept = ptx::shuffle_within<4>(drawn, half) >> (2 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = x[i / 2 * 4 + half * 2 + i % 2];
        value = (kept >> (i / 2 * 8 + i % 2) & 1u) != 0 ? value * dropout.keep_scale : 0.0f;
      }
    }
  }

  const TileDescriptor& work_tile_;
  ptx::SharedAddress shared_;
  uint32_t at_;  // where the lane stores, in a tile of scores
  int32_t row_;  // first query of the thread, in the tile
  common::UnmaskedRows unmasked_;
  float scale_log2_;
  float dropout_scale_;    // of the weights that dropout keeps
  bool far_rows_ = false;  // whether the call has any
};

}  // namespace tilewise::cuda::wgmma
