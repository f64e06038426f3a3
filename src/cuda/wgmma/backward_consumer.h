// Accumulators and the five products of a consumer warpgroup of the backward by keys.
//
// S^T = K Q^T and dP^T = V dO^T are computed with 64 keys per warpgroup, so that the P^T and dS^T
// of a thread are the operands of its products for dV and dK. With g = lane / 4 and t = lane % 4,
// value 4 j + e of s and dp belongs to
//
//   key    g + 8 (e / 2)        of the 16 keys of the warp
//   query  8 j + 2 t + e % 2    of the query tile
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/fragment.h"
#include "cuda/wgmma/backward_plan.h"

namespace tilewise::cuda::wgmma {

// Scores of a thread, and the same in 16 bits as operands, where element k holds 16 queries.
template <class C>
using ScoreSums = float[BackwardPlan<C>::kQueries / 2];
template <class C>
using ScoreOperands = uint32_t[BackwardPlan<C>::kQueries / 16][4];
template <class C>
using DqSums = float[BackwardPlan<C>::kDqGroups * 4];

template <class C>
class Products {
  using Plan = BackwardPlan<C>;
  template <int kN>
  using Wgmma = ptx::Wgmma<kN, C::kHalf>;

 public:
  TILEWISE_DEVICE Products(ptx::SharedAddress shared, int warpgroup)
      : k_(typename Plan::KTile{shared + Plan::kK}.by_columns(warpgroup * 64)),
        v_(typename Plan::VTile{shared + Plan::kV}.by_columns(warpgroup * 64)),
        q_(typename Plan::QTile{shared + Plan::kQ}.by_columns()),
        q_rows_(typename Plan::QTile{shared + Plan::kQ}.by_rows()),
        dout_(typename Plan::DoutTile{shared + Plan::kDout}.by_columns()),
        dout_rows_(typename Plan::DoutTile{shared + Plan::kDout}.by_rows()),
        ds_(typename Plan::DsTile{shared + Plan::kDs}.by_columns(
            Plan::kTransposedDq ? 0 : warpgroup * 64)),
        k_rows_(
            typename Plan::KTile{shared + Plan::kK}.by_rows(Plan::kTransposedDq ? warpgroup : 0)) {}

  // S^T = K Q^T. Unless kFromZero, the product is added to `s`: row statistics or score_mod.
  template <bool kFromZero>
  TILEWISE_DEVICE void start_s(ScoreSums<C>& s, int stage) const {
    const uint64_t keys = opaque_descriptor(k_);
    const uint64_t q = q_ + stage_step<typename Plan::QTile>(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
      const uint64_t a = keys + Plan::KTile::column_step(k);
      const uint64_t b = q + Plan::QTile::column_step(k);
      if (!kFromZero || k > 0)
        Wgmma<Plan::kQueries>::template add<false, false>(s, a, b);
      else
        Wgmma<Plan::kQueries>::template start<false, false>(s, a, b);
    }
    ptx::wgmma_commit_group();
  }

  // dP^T = V dO^T, likewise.
  template <bool kFromZero>
  TILEWISE_DEVICE void start_dp(ScoreSums<C>& dp, int stage) const {
    const uint64_t values = opaque_descriptor(v_);
    const uint64_t dout = dout_ + stage_step<typename Plan::DoutTile>(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kHeadDimV / 16; ++k) {
      const uint64_t a = values + Plan::VTile::column_step(k);
      const uint64_t b = dout + Plan::DoutTile::column_step(k);
      if (!kFromZero || k > 0)
        Wgmma<Plan::kQueries>::template add<false, false>(dp, a, b);
      else
        Wgmma<Plan::kQueries>::template start<false, false>(dp, a, b);
    }
    ptx::wgmma_commit_group();
  }

  // dV += P^T dO
  TILEWISE_DEVICE void add_dv(float (&dv)[C::kHeadDimV / 2], const ScoreOperands<C>& p,
                              int stage) const {
    const uint64_t dout = dout_rows_ + stage_step<typename Plan::DoutTile>(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Plan::kQueries / 16; ++k)
      Wgmma<C::kHeadDimV>::template add<true>(dv, p[k], dout + Plan::DoutTile::row_step(k));
    ptx::wgmma_commit_group();
  }

  // dK += dS^T Q
  TILEWISE_DEVICE void add_dk(float (&dk)[C::kHeadDim / 2], const ScoreOperands<C>& ds,
                              int stage) const {
    const uint64_t q = q_rows_ + stage_step<typename Plan::QTile>(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Plan::kQueries / 16; ++k)
      Wgmma<C::kHeadDim>::template add<true>(dk, ds[k], q + Plan::QTile::row_step(k));
    ptx::wgmma_commit_group();
  }

  // dQ = dS K, or dQ^T = K^T dS^T, with the dS of both warpgroups.
  TILEWISE_DEVICE void start_dq(DqSums<C>& dq, int stage) const {
    constexpr int kN = Plan::kDqGroups * 8;
    const uint64_t ds = ds_ + stage_step<typename Plan::DsTile>(stage);
    const uint64_t rows = opaque_descriptor(k_rows_);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Plan::kKeys / 16; ++k) {
      const uint64_t scores = ds + Plan::DsTile::column_step(k);
      const uint64_t keys = rows + Plan::KTile::row_step(k);
      if constexpr (Plan::kTransposedDq) {
        if (k > 0)
          Wgmma<kN>::template add<true, false>(dq, keys, scores);
        else
          Wgmma<kN>::template start<true, false>(dq, keys, scores);
      } else {
        if (k > 0)
          Wgmma<kN>::template add<false, true>(dq, scores, keys);
        else
          Wgmma<kN>::template start<false, true>(dq, scores, keys);
      }
    }
    ptx::wgmma_commit_group();
  }

 private:
  // In the general form, hides from ptxas that a descriptor is the same in all steps. ptxas would
  // otherwise keep the addresses that it derives from descriptors across the form's several loops,
  // and they do not fit in the uniform registers.
  static TILEWISE_DEVICE uint64_t opaque_descriptor(uint64_t descriptor) {
    return C::kGeneral ? ptx::opaque_u64(descriptor) : descriptor;
  }
  template <class Tile>
  static TILEWISE_DEVICE uint64_t stage_step(int stage) {
    return static_cast<uint64_t>(stage * (Tile::kBytes >> 4));
  }

  uint64_t k_, v_, q_, q_rows_, dout_, dout_rows_, ds_, k_rows_;
};

// Initialises `x` with the statistics of its queries.
template <class C>
TILEWISE_DEVICE void preload(ScoreSums<C>& x, ptx::SharedAddress statistic) {
  const ptx::SharedAddress from = statistic + static_cast<uint32_t>(ptx::lane_index() % 4 * 16);
#pragma unroll
  for (int k = 0; k < BackwardPlan<C>::kQueries / 16; ++k) {
    uint32_t y[4];
    ptx::ld_shared_v4_b32(y, from + static_cast<uint32_t>(k * 64));
#pragma unroll
    for (int e = 0; e < 8; ++e) x[8 * k + e] = ptx::float_of(y[e / 4 * 2 + e % 2]);
  }
  ptx::fence_register(x);
}

// The statistics of queries 8 j + 2 t and 8 j + 2 t + 1.
struct StatisticPair {
  float x[2];

  TILEWISE_DEVICE StatisticPair(ptx::SharedAddress statistic, int j) {
    uint32_t bits[2];
    ptx::ld_shared_v2_b32(bits,
                          statistic + static_cast<uint32_t>(j * 32 + ptx::lane_index() % 4 * 8));
    x[0] = ptx::float_of(bits[0]);
    x[1] = ptx::float_of(bits[1]);
  }
};

// P = exp(S - lse), in fp32 and as operands. kPreloaded: S has started at -lse / scale.
template <class C, bool kPreloaded>
TILEWISE_DEVICE void softmax(ScoreSums<C>& s, ScoreOperands<C>& p, float scale_log2,
                             [[maybe_unused]] ptx::SharedAddress lse) {
  using Plan = BackwardPlan<C>;
#pragma unroll
  for (int j = 0; j < Plan::kQueries / 8; ++j) {
    if constexpr (kPreloaded) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] = ptx::ex2(s[4 * j + e] * scale_log2);
    } else {
      const StatisticPair l(lse, j);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[4 * j + e] = ptx::ex2(ptx::fma(s[4 * j + e], scale_log2, l.x[e % 2]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      p[j / 2][j % 2 * 2 + half] =
          tile::pack<typename C::Element>(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]);
  }
}

// dS = P (dP - delta), likewise.
template <class C, bool kPreloaded>
TILEWISE_DEVICE void softmax_gradient(const ScoreSums<C>& p, ScoreSums<C>& dp, ScoreOperands<C>& ds,
                                      [[maybe_unused]] ptx::SharedAddress delta) {
  using Plan = BackwardPlan<C>;
#pragma unroll
  for (int j = 0; j < Plan::kQueries / 8; ++j) {
    if constexpr (kPreloaded) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[4 * j + e] *= p[4 * j + e];
    } else {
      const StatisticPair d(delta, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[4 * j + e] = p[4 * j + e] * (dp[4 * j + e] + d.x[e % 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ds[j / 2][j % 2 * 2 + half] =
          tile::pack<typename C::Element>(dp[4 * j + 2 * half], dp[4 * j + 2 * half + 1]);
  }
}

// Stores the warp's dS^T to the tile [query][key] of a stage, for the products of both warpgroups.
template <class C>
class DsStore {
  using Plan = BackwardPlan<C>;

 public:
  TILEWISE_DEVICE DsStore(ptx::SharedAddress shared, int warpgroup, int warp) {
    const int lane = ptx::lane_index();
    const int row = lane / 16 * 8 + lane % 8;
    const int chunk = warpgroup * 8 + warp * 2 + lane / 8 % 2;
    at_ = shared + static_cast<uint32_t>(Plan::kDs + Plan::DsTile::chunk_offset(row, chunk));
  }
  TILEWISE_DEVICE void store(const ScoreOperands<C>& ds, int stage) const {
    const ptx::SharedAddress at = at_ + static_cast<uint32_t>(stage * Plan::DsTile::kBytes);
#pragma unroll
    for (int k = 0; k < Plan::kQueries / 16; ++k)
      ptx::stmatrix_x4_trans(at + static_cast<uint32_t>(k * 16 * tile::kSwizzledRowBytes), ds[k]);
  }

 private:
  ptx::SharedAddress at_;
};

// Stages the warp's dQ in shared memory for the reduction warp.
template <class C>
class DqStaging {
  using Plan = BackwardPlan<C>;

 public:
  TILEWISE_DEVICE DqStaging(ptx::SharedAddress shared, int warpgroup, int warp)
      : at_(shared +
            static_cast<uint32_t>(Plan::kDq + (warpgroup * 4 + warp) * Plan::kDqSliceBytes +
                                  ptx::lane_index() * 16)),
        exists_(Plan::kDqSlices == 8 || warpgroup * 4 + warp < Plan::kDqSlices),
        warpgroup_(warpgroup) {}

  TILEWISE_DEVICE void store(const DqSums<C>& dq) const {
    ptx::bar_sync(kDqEmpty + warpgroup_, kDqThreads);
    if (Plan::kDqSlices == 8 || exists_) {
#pragma unroll
      for (int i = 0; i < Plan::kDqGroups; ++i) {
        const uint32_t x[4] = {ptx::bits_of(dq[4 * i]), ptx::bits_of(dq[4 * i + 1]),
                               ptx::bits_of(dq[4 * i + 2]), ptx::bits_of(dq[4 * i + 3])};
        ptx::st_shared_v4_b32(at_ + static_cast<uint32_t>(i * 512), x);
      }
    }
  }
  TILEWISE_DEVICE void send() const {
    ptx::fence_proxy_async();
    ptx::bar_arrive(kDqFull + warpgroup_, kDqThreads);
  }

 private:
  ptx::SharedAddress at_;
  bool exists_;
  int warpgroup_;
};

}  // namespace tilewise::cuda::wgmma
