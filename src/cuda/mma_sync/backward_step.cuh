// Where the tiles of a step of the backward lie in shared memory, and how S and dP of a warp become
// P and dS there.
#pragma once

#include "cuda/mma_sync/backward_rows.cuh"
#include "cuda/mma_sync/backward_scores.cuh"
#include "cuda/tile/operands.h"

namespace tilewise::cuda::mma_sync {

// The addresses of the tiles of a step.
template <class C>
struct StepTiles {
  using Plan = BackwardPlan<C>;

  TILEWISE_DEVICE StepTiles(ptx::SharedAddress shared, int stage, int score_tile, int query)
      : warp_query(query),
        warp_rows(static_cast<uint32_t>(query * Plan::kRowBytes)),
        q(shared + static_cast<uint32_t>(Plan::row_tiles(stage))),
        d_out(q + Plan::kRowTileBytes),
        thread_lse(shared + Plan::kStatistics +
                   static_cast<uint32_t>(stage * Plan::kStatisticsBytes +
                                         (query + ptx::lane_index() % 4 * 2) * 4)),
        thread_delta(thread_lse + Plan::kQueries * 4),
        ds(shared + Plan::kDS + static_cast<uint32_t>(score_tile * Plan::kScoreTileBytes)),
        p(shared + Plan::kP + static_cast<uint32_t>(score_tile * Plan::kScoreTileBytes)) {}

  int warp_query;      // the first query of the warp
  uint32_t warp_rows;  // its byte offset in the tiles of q and d_out
  ptx::SharedAddress q;
  ptx::SharedAddress d_out;
  ptx::SharedAddress thread_lse;
  ptx::SharedAddress thread_delta;
  ptx::SharedAddress ds;
  ptx::SharedAddress p;
};

// Applies the mask to S^T, and makes the scores of far rows relative. `warp_key` and `warp_query`
// are the first ones of the warp in the CTA's keys and in the row tile.
template <class C>
TILEWISE_DEVICE void hide_scores(ScoreSums<C>& s, const BackwardParams& p,
                                 const KeyTile<C>& key_tile, const TileRecord<C>& record,
                                 int warp_key, int warp_query, int lane, float scale_log2) {
  ptx::force_branch();
  const float hidden = scale_log2 > 0.0f ? kMinusInfinity : -kMinusInfinity;
  const int32_t query = record.row() + warp_query + lane % 4 * 2;
  if (key_tile.far_rows()) [[unlikely]]
    make_relative<C>(
        s, p, int64_t{record.index()} * BackwardPlan<C>::kQueries + warp_query + lane % 4 * 2,
        scale_log2);
  KeyMask<C>(key_tile, warp_key + lane / 4, query).apply(s, hidden);
}

// P^T or dS^T of the warp's own queries, as operands.
template <class C>
using OwnScores = tile::Operands<typename C::Element, 2, max(1, BackwardPlan<C>::kOwnSteps)>;

// Stores P and dS of the warp: to its operands, and to shared memory for the other warps. Column
// warps each store 16 of their 32 keys.
template <class C, class Offsets>
TILEWISE_DEVICE void store_scores(OwnScores<C>& p_own, OwnScores<C>& ds_own, ScoreSums<C>& s,
                                  ScoreSums<C>& dp, const Offsets& scores, const StepTiles<C>& at,
                                  float scale_log2, int column_warp) {
  using Plan = BackwardPlan<C>;
#pragma unroll
  for (int n = 0; n < Plan::kWarpQueries / 8; ++n) {
    if constexpr (!C::kGeneral) softmax_and_derivative<C>(s, dp, n, scale_log2, at.thread_lse);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      p_own.set(m, n, s.x[m][n]);
      ds_own.set(m, n, dp.x[m][n]);
      if (Plan::kColumnWarps > 1 && m != column_warp) continue;
      constexpr int kChunks = Plan::kBytes / 2;  // per 8 queries
#pragma unroll
      for (int i = 0; i < 2 * kChunks; ++i) {
        const int chunk = n * kChunks + i / 2;
        const uint32_t word = scores.word(16 * m + i % 2 * 8, chunk);
        if (Plan::kShareP)
          ptx::st_shared_b32(at.p + word, p_own.r[chunk / 2][m][chunk % 2 * 2 + i % 2]);
        ptx::st_shared_b32(at.ds + word, ds_own.r[chunk / 2][m][chunk % 2 * 2 + i % 2]);
      }
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
