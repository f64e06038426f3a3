// The consumer warpgroups of the backward kernel for head dims up to 128. Each has 64 of the keys
// of the CTA. A step (one query tile) computes these results and keeps them in these places:
//
//   S^T = K Q^T, dP^T = V dO^T    registers; a row of these accumulators is a key
//   P = exp(S - lse)              registers
//   dS = P (dP - delta)           registers, and shared memory for the other warpgroup
//   dV += P dO                    registers until the work tile ends
//   ---------------------------- named barrier kConsumers: all of dS is in shared memory
//   dQ = dS K                     half of the columns (or rows) per warpgroup
//   dK += dS Q                    registers until the work tile ends
//   dQ to shared memory           for the reduction warp of the warpgroup
//
//   k_full, v_full, kv_empty      mbarriers; K and V of a work tile
//   q_full, q_empty               mbarriers; Q and lse of a stage
//   dout_full, dout_empty         mbarriers; dO and delta of a stage
//   kDqFull, kDqEmpty             named barriers of a warpgroup and its reduction warp
//
// The timeline of two steps:
//
//   products     S0 dP0        dV0   dQ0 dK0 | S1 dP1        dV1   dQ1 dK1 |
//   registers          P0  dS0           dQ0 to shared   P1  dS1           dQ1 to shared
//   reduction                                      | dQ0 to dq_sum               | dQ1 to dq_sum
//
// Accesses to shared memory queue behind those of the products that are already issued. So a step
// reads everything else from there before it issues its products, and stores dS before it issues
// dV. arch::SendDq says when a step releases its dQ to the reduction warp: usually when the next S
// and dP are in flight.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/wgmma/backward_consumer.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_score_mod.h"
#include "cuda/wgmma/backward_steps.h"

namespace tilewise::cuda::wgmma {

// Whether the accumulators of S and dP start at their row statistics (lse and delta) instead of 0.
// Then delta is needed before the products start.
template <class C, Option kOption>
inline constexpr bool kPreloads = C::kBackward.preload && kOption != Option::any;

// Adds all steps of a work tile to dk and dv. `first_step` counts the steps of the CTA's work tiles
// before this one. Returns the number of steps.
template <class C, Option kOption>
TILEWISE_DEVICE int32_t mainloop_by_keys(const TmaBackwardParams& params,
                                         const TileDescriptor& work_tile,
                                         const Products<C>& products, ConsumerSteps<C>& steps,
                                         ptx::SharedAddress shared, int warpgroup, int warp,
                                         int32_t first_step, float (&dk)[C::kHeadDim / 2],
                                         float (&dv)[C::kHeadDimV / 2]) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const DsStore<C> ds_store(shared, warpgroup, warp);
  const DqStaging<C> dq_staging(shared, warpgroup, warp);
  const int thread_key = warpgroup * 64 + warp * 16 + ptx::lane_index() / 4;
  const auto mask = steps.mask(work_tile, thread_key);
  const float scale_log2 = exponent_scale(score_of(params.problem).scale);
  [[maybe_unused]] BackwardScoreMod<C, kOption> score_mod(params, work_tile, thread_key);
  [[maybe_unused]] const bool never = params.problem.heads_q == 0;
  const int32_t end = first_step + work_tile.steps;
  RowWalk walk(work_tile);
  [[maybe_unused]] const int32_t begin = walk.row;
  if constexpr (kOneOption<kOption>) {
    if (first_step < end) score_mod.prefetch_bias(walk);
  }
  int32_t step = first_step;
#pragma unroll 1
  for (; steps.more(step, end); ++step, steps.next()) {
    steps.begin();
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    const ptx::SharedAddress lse =
        shared + static_cast<uint32_t>(Plan::kLse + stage * Plan::kStatisticBytes);
    const ptx::SharedAddress delta =
        shared + static_cast<uint32_t>(Plan::kDelta + stage * Plan::kStatisticBytes);
    float s[Plan::kQueries / 2], dp[Plan::kQueries / 2], dq[Plan::kDqGroups * 4];
    ScoreOperands<C> p, ds;

    // S^T = K Q^T and dP^T = V dO^T
    if constexpr (kOption == Option::any) {
      score_mod.init_scores(params.problem, s, walk);
      ptx::fence_register(s);
    }
    ptx::mbarrier_wait_parity(barriers.q_full(stage), parity);
    if constexpr (kPreloads<C, kOption>)
      ptx::mbarrier_wait_parity(barriers.dout_full(stage), parity);
    if constexpr (kOneOption<kOption>) {
      score_mod.init_accumulators(s, dp, walk, lse, delta);
    } else if constexpr (Plan::kPreload) {
      preload<C>(s, lse);
      preload<C>(dp, delta);
    }
    products.template start_s<BackwardScoreMod<C, kOption>::kScoresFromZero>(s, stage);
    if constexpr (!kPreloads<C, kOption>)
      ptx::mbarrier_wait_parity(barriers.dout_full(stage), parity);
    products.template start_dp<BackwardScoreMod<C, kOption>::kGradientFromZero>(dp, stage);
    if (Plan::kSendsUnderScores && step > first_step) dq_staging.send();

    // P = exp(S - lse), dS = P (dP - delta)
    if constexpr (kOneOption<kOption>) {
      if (step + 1 < end) score_mod.prefetch_bias(walk.next(Plan::kQueries));
      score_mod.draw_dropout(walk);
      ptx::scheduling_fence(never);
      ptx::wgmma_wait_group<1>();
      ptx::fence_register(s);
      score_mod.compute_p(s, p, walk, mask, lse);
      ptx::scheduling_fence(never);
      ptx::wgmma_wait_group<0>();
      ptx::fence_register(dp);
      score_mod.compute_ds(s, dp, ds, delta);
    } else if constexpr (kOption == Option::any) {
      ptx::wgmma_wait_group<0>();
      ptx::fence_register(s);
      ptx::fence_register(dp);
      score_mod.apply(params, s, dp, p, ds, walk, mask, lse, delta);
    } else {
      ptx::wgmma_wait_group<1>();
      ptx::fence_register(s);
      if (mask.touches(walk.row)) {
        ptx::force_branch();
        mask.apply(s, walk.row, scale_log2 > 0.0f ? kMinusInfinity : -kMinusInfinity);
      }
      softmax<C, Plan::kPreload>(s, p, scale_log2, lse);
      if constexpr (Plan::kTile.send == arch::SendDq::under_dp) {
        if (step > first_step) dq_staging.send();
        ptx::scheduling_fence(never);  // otherwise ptxas waits for dp before p (1 to 3 %)
      }
      ptx::wgmma_wait_group<0>();
      ptx::fence_register(dp);
      softmax_gradient<C, Plan::kPreload>(s, dp, ds, delta);
    }

    ds_store.store(ds, stage);
    products.add_dv(dv, p, stage);  // dV += P^T dO
    // This fence, which lets the products read ds, is issued with dv in flight. If it preceded dv,
    // the tensor cores would wait for it (D64: 3 to 7 %, D128: 1 to 4 %).
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumers, Plan::kConsumerThreads);
    products.start_dq(dq, stage);    // dQ = dS K
    products.add_dk(dk, ds, stage);  // dK += dS^T Q
    ptx::wgmma_wait_group<1>();
    ptx::mbarrier_arrive(barriers.dout_empty(stage));
    ptx::fence_register(dq);
    dq_staging.store(dq);
    if (Plan::kTile.send == arch::SendDq::at_once) dq_staging.send();
    ptx::wgmma_wait_group<0>();
    ptx::mbarrier_arrive(barriers.q_empty(stage));
    if constexpr (Plan::kTile.spare_registers)
      walk.advance(Plan::kQueries, begin);
    else
      walk.advance(Plan::kQueries);
  }
  ptx::wgmma_wait_group<0>();
  ptx::fence_register(dk);
  ptx::fence_register(dv);
  if (Plan::kTile.send != arch::SendDq::at_once && steps.end_of(step, end) > first_step)
    dq_staging.send();
  return step - first_step;
}

// Stores dk and dv of a warp, through its part of the shared memory of dS.
template <class C>
TILEWISE_DEVICE void store_by_keys(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                                   ptx::SharedAddress shared, int consumer_warp,
                                   const float (&dk)[C::kHeadDim / 2],
                                   const float (&dv)[C::kHeadDimV / 2], float dv_scale) {
  using Plan = BackwardPlan<C>;
  const Gradients& g = p.gradients;
  const int first = consumer_warp * 16;
  const int keys = work_tile.key_count - first;
  const ptx::SharedAddress tile_of_warp =
      shared + static_cast<uint32_t>(Plan::kDs + consumer_warp * Plan::WarpKeysTile::kBytes);
  store_keys<C>(dv, dv_scale, tile_of_warp, g.dv, work_tile.dv + first * g.dv.stride_row, keys,
                p.problem.head_dim_v);
  store_keys<C>(dk, score_of(p.problem).scale, tile_of_warp, g.dk,
                work_tile.dk + first * g.dk.stride_row, keys, p.problem.head_dim);
}

template <class C, Option kOption>
TILEWISE_DEVICE void by_keys_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                                  int warpgroup, int warp) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const Products<C> products(shared, warpgroup);
  ConsumerSteps<C> steps(shared);
  int32_t first_step = 0;
#pragma unroll 1
  for (int32_t tile_number = 0;; ++tile_number) {
    const int stage = tile_number % Plan::kDescriptorStages;
    ptx::mbarrier_wait_parity(barriers.descriptor_full(stage),
                              tile_number / Plan::kDescriptorStages & 1);
    const TileDescriptor& work_tile = tile_descriptor<C>(stage);
    if (work_tile.steps < 0) break;
    float dk[C::kHeadDim / 2];
    float dv[C::kHeadDimV / 2];
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    if (steps.start(work_tile) > 0)
      prepare_kv<C>(p, work_tile, shared, ptx::thread_index() - ptx::kWarpgroupSize,
                    tile_number & 1);
    else
      wait_for_kv(barriers, tile_number & 1);
    const int32_t walked = mainloop_by_keys<C, kOption>(p, work_tile, products, steps, shared,
                                                        warpgroup, warp, first_step, dk, dv);
    first_step += steps.count(walked, work_tile);
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barriers.kv_empty());

    if (p.key_flags.data != nullptr && ptx::any(!all_finite(dk) || !all_finite(dv)) &&
        ptx::lane_index() == 0) {
      p.key_flags.data[work_tile.index] = 1;
    }
    ptx::bar_sync(kConsumers, Plan::kConsumerThreads);  // no warp reads dS any more
    store_by_keys<C>(p, work_tile, shared, warpgroup * 4 + warp, dk, dv,
                     BackwardScoreMod<C, kOption>::dv_scale(p.problem));
    ptx::bar_sync(kConsumers, Plan::kConsumerThreads);  // no warp reads dk and dv there any more
  }
  ptx::griddepcontrol_launch_dependents();
}

template <class C>
struct ByKeysRole {
  const TmaBackwardParams& p;
  ptx::SharedAddress shared;
  int warpgroup;
  int warp;

  template <Option kOption>
  TILEWISE_DEVICE void run() const {
    by_keys_role<C, kOption>(p, shared, warpgroup, warp);
  }
};

}  // namespace tilewise::cuda::wgmma
