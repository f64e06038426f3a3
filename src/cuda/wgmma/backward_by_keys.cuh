// The math warpgroups of head dims up to 128: each has 64 of the keys of the block.
//
//   s = K Q^T, dp = V dO^T     transposed: a row of the sums is a key
//   p = exp(s - lse)           registers
//   ds = p (dp - delta)        registers, and shared memory for the other warpgroup
//   dv += p dO                 registers to the end
//   ---------------------------- barrier: all of ds is in shared memory
//   dq = ds K                  half of the columns (or rows) each
//   dk += ds Q                 registers to the end
//   dq to shared memory        for the warp that sends it
//
// Shared memory is served in order behind queued products: what a step reads from there comes
// before its products, ds is stored before dv, and dq leaves when the next scores are under way.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_mask.h"
#include "cuda/wgmma/backward_math.h"
#include "cuda/wgmma/backward_terms.h"

namespace tilewise::cuda::wgmma {

// Whether what is known of dO is needed before the products.
template <class C, Option kOption>
inline constexpr bool kPreloads = C::kBackward.preload && kOption != Option::any;

// dk and dv of a piece of work. `passed`: steps before it.
template <class C, Option kOption>
TILEWISE_DEVICE void walk_by_keys(const TmaBackwardParams& params, const TileDescriptor& work,
                                  const Products<C>& products, ptx::SharedAddress shared,
                                  int warpgroup, int warp, int32_t passed,
                                  float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDimV / 2]) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const DsStore<C> ds_store(shared, warpgroup, warp);
  const DqStage<C> dq_stage(shared, warpgroup, warp);
  const int own_key = warpgroup * 64 + warp * 16 + ptx::lane_index() / 4;
  const KeyMask<C> mask(work, own_key);
  const float scale_log2 = exponent_scale(score_of(params.problem).scale);
  [[maybe_unused]] BackwardTerms<C, kOption> terms(params.problem, work, own_key);
  [[maybe_unused]] const bool never = params.problem.heads_q == 0;
  const int32_t end = passed + work.steps;
  RowWalk walk(work);
  [[maybe_unused]] const int32_t begin = walk.row;
  if constexpr (kOneOption<kOption>) {
    if (passed < end) terms.fetch(walk);
  }
#pragma unroll 1
  for (int32_t step = passed; step < end; ++step) {
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    const ptx::SharedAddress lse =
        shared + static_cast<uint32_t>(Plan::kLse + stage * Plan::kStatisticBytes);
    const ptx::SharedAddress delta =
        shared + static_cast<uint32_t>(Plan::kDelta + stage * Plan::kStatisticBytes);
    float s[Plan::kQueries / 2], dp[Plan::kQueries / 2], dq[Plan::kDqGroups * 4];
    ScoreOperands<C> p, ds;

    if constexpr (kOption == Option::any) {
      terms.preload(params.problem, s, walk);
      ptx::keep(s);
    }
    ptx::mbarrier_wait_parity(barriers.q_landed(stage), parity);
    if constexpr (kPreloads<C, kOption>)
      ptx::mbarrier_wait_parity(barriers.dout_landed(stage), parity);
    if constexpr (kOneOption<kOption>) {
      terms.start(s, dp, walk, lse, delta);
    } else if constexpr (Plan::kPreload) {
      preload<C>(s, lse);
      preload<C>(dp, delta);
    }
    products.template start_s<BackwardTerms<C, kOption>::kScoresFromZero>(s, stage);
    if constexpr (!kPreloads<C, kOption>)
      ptx::mbarrier_wait_parity(barriers.dout_landed(stage), parity);
    products.template start_dp<BackwardTerms<C, kOption>::kGradientFromZero>(dp, stage);
    if (Plan::kSendsUnderScores && step > passed) dq_stage.send();

    if constexpr (kOneOption<kOption>) {
      if (step + 1 < end) terms.fetch(walk.next(Plan::kQueries));
      terms.draw(walk);
      ptx::hold_order(never);
      ptx::wgmma_wait_group<1>();
      ptx::keep(s);
      terms.weights(s, p, walk, mask, lse);
      ptx::hold_order(never);
      ptx::wgmma_wait_group<0>();
      ptx::keep(dp);
      terms.gradient(s, dp, ds, delta);
    } else if constexpr (kOption == Option::any) {
      ptx::wgmma_wait_group<0>();
      ptx::keep(s);
      ptx::keep(dp);
      terms.apply(params.problem, s, dp, p, ds, walk, mask, lse, delta);
    } else {
      ptx::wgmma_wait_group<1>();
      ptx::keep(s);
      if (mask.touches(walk.row)) {
        ptx::keep_branch();
        mask.apply(s, walk.row, scale_log2 > 0.0f ? kMinusInfinity : -kMinusInfinity);
      }
      softmax<C, Plan::kPreload>(s, p, scale_log2, lse);
      if constexpr (Plan::kTile.send == arch::SendDq::under_dp) {
        if (step > passed) dq_stage.send();
        ptx::hold_order(never);  // ptxas waits for dp before p otherwise (1 to 3 %)
      }
      ptx::wgmma_wait_group<0>();
      ptx::keep(dp);
      softmax_gradient<C, Plan::kPreload>(s, dp, ds, delta);
    }

    ds_store.store(ds, stage);
    products.add_dv(dv, p, stage);
    // Of ds, with dv under way: the tensor cores would wait for it (D64 3 to 7 %, D128 1 to 4 %).
    ptx::fence_proxy_async();
    ptx::bar_sync(kMath, Plan::kMathThreads);
    products.start_dq(dq, stage);
    products.add_dk(dk, ds, stage);
    ptx::wgmma_wait_group<1>();
    ptx::mbarrier_arrive(barriers.dout_read(stage));
    ptx::keep(dq);
    dq_stage.store(dq);
    if (Plan::kTile.send == arch::SendDq::at_once) dq_stage.send();
    ptx::wgmma_wait_group<0>();
    ptx::mbarrier_arrive(barriers.q_read(stage));
    if constexpr (Plan::kQueries == 80)
      walk.advance(Plan::kQueries);
    else
      walk.advance(Plan::kQueries, begin);
  }
  ptx::wgmma_wait_group<0>();
  ptx::keep(dk);
  ptx::keep(dv);
  if (Plan::kTile.send != arch::SendDq::at_once && end > passed) dq_stage.send();
}

// dk and dv of a warp to memory, through its part of the place of dS.
template <class C>
TILEWISE_DEVICE void store_by_keys(const TmaBackwardParams& p, const TileDescriptor& work,
                                   ptx::SharedAddress shared, int own_warp,
                                   const float (&dk)[C::kHeadDim / 2],
                                   const float (&dv)[C::kHeadDimV / 2], float dv_scale) {
  using Plan = BackwardPlan<C>;
  const Gradients& g = p.gradients;
  const int first = own_warp * 16;
  const int keys = work.key_count - first;
  const ptx::SharedAddress own =
      shared + static_cast<uint32_t>(Plan::kDs + own_warp * Plan::OwnKeys::kBytes);
  store_keys<C>(dv, dv_scale, own, g.dv, work.dv + first * g.dv.stride_row, keys,
                p.problem.head_dim_v);
  store_keys<C>(dk, score_of(p.problem).scale, own, g.dk, work.dk + first * g.dk.stride_row, keys,
                p.problem.head_dim);
}

template <class C, Option kOption>
TILEWISE_DEVICE void by_keys_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                                  int warpgroup, int warp) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const Products<C> products(shared, warpgroup);
  int32_t steps = 0;
#pragma unroll 1
  for (int32_t piece = 0;; ++piece) {
    const int slot = piece % Plan::kRecordSlots;
    ptx::mbarrier_wait_parity(barriers.record_landed(slot), piece / Plan::kRecordSlots & 1);
    const TileDescriptor& work = received_work<C>(slot);
    if (work.steps < 0) break;
    float dk[C::kHeadDim / 2];
    float dv[C::kHeadDimV / 2];
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    if (work.steps > 0)
      await_keys<C>(p, work, shared, ptx::thread_index() - ptx::kWarpgroupSize, piece & 1);
    else
      await_landing(barriers, piece & 1);
    walk_by_keys<C, kOption>(p, work, products, shared, warpgroup, warp, steps, dk, dv);
    steps += work.steps;
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barriers.keys_left());

    if (p.key_flags.data != nullptr && ptx::any(!all_finite(dk) || !all_finite(dv)) &&
        ptx::lane_index() == 0) {
      p.key_flags.data[work.index] = 1;
    }
    ptx::bar_sync(kMath, Plan::kMathThreads);  // nobody reads dS any more
    store_by_keys<C>(p, work, shared, warpgroup * 4 + warp, dk, dv,
                     BackwardTerms<C, kOption>::dv_scale(p.problem));
    ptx::bar_sync(kMath, Plan::kMathThreads);  // nor dk and dv in its place
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
