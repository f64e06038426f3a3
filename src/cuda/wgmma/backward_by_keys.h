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

// dk and dv of all steps.
template <class C>
TILEWISE_DEVICE void walk_by_keys(const TmaBackwardParams& params, const KeyWork<C>& work,
                                  ptx::SharedAddress shared, int warpgroup, int warp,
                                  float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDimV / 2]) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const Products<C> products(shared, warpgroup);
  const DsStore<C> ds_store(shared, warpgroup, warp);
  const DqStage<C> dq_stage(shared, warpgroup, warp);
  const int own_key = warpgroup * 64 + warp * 16 + ptx::lane_index() / 4;
  const KeyMask<C> mask(work, own_key);
  const float scale_log2 = exponent_scale(score_of(params.problem).scale);
  [[maybe_unused]] const BackwardTerms<C> terms(params.problem, work, own_key);
  const bool speaker = ptx::lane_index() == 0;
  RowWalk walk = work.walk(params.problem);
#pragma unroll 1
  for (int32_t step = 0; step < work.steps; ++step) {
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    const ptx::SharedAddress lse =
        shared + static_cast<uint32_t>(Plan::kLse + stage * Plan::kStatisticBytes);
    const ptx::SharedAddress delta =
        shared + static_cast<uint32_t>(Plan::kDelta + stage * Plan::kStatisticBytes);
    float s[Plan::kQueries / 2], dp[Plan::kQueries / 2], dq[Plan::kDqGroups * 4];
    ScoreOperands<C> p, ds;

    ptx::mbarrier_wait_parity(barriers.q_landed(stage), parity);
    if constexpr (Plan::kPreload) {
      ptx::mbarrier_wait_parity(barriers.dout_landed(stage), parity);
      preload<C>(s, lse);
      preload<C>(dp, delta);
    }
    products.start_s(s, stage);
    if constexpr (!Plan::kPreload) ptx::mbarrier_wait_parity(barriers.dout_landed(stage), parity);
    products.start_dp(dp, stage);
    if (Plan::kSendsUnderScores && step > 0) dq_stage.send();

    if constexpr (C::kGeneral) {
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
      softmax<C>(s, p, scale_log2, lse);
      if (Plan::kTile.send == arch::SendDq::under_dp && step > 0) dq_stage.send();
      ptx::wgmma_wait_group<0>();
      ptx::keep(dp);
      softmax_gradient<C>(s, dp, ds, delta);
    }

    ds_store.store(ds, stage);
    products.add_dv(dv, p, stage);
    ptx::bar_sync(kMath, Plan::kMathThreads);
    products.start_dq(dq, stage);
    products.add_dk(dk, ds, stage);
    ptx::wgmma_wait_group<1>();
    if (speaker) ptx::mbarrier_arrive(barriers.dout_read(stage));
    ptx::keep(dq);
    dq_stage.store(dq);
    if (Plan::kTile.send == arch::SendDq::at_once) dq_stage.send();
    ptx::wgmma_wait_group<0>();
    if (speaker) ptx::mbarrier_arrive(barriers.q_read(stage));
    walk.advance(Plan::kQueries);
  }
  ptx::wgmma_wait_group<0>();
  ptx::keep(dk);
  ptx::keep(dv);
  if (Plan::kTile.send != arch::SendDq::at_once && work.steps > 0) dq_stage.send();
}

template <class C>
TILEWISE_DEVICE void by_keys_role(const TmaBackwardParams& p, const KeyWork<C>& work,
                                  ptx::SharedAddress shared, int warpgroup, int warp) {
  using Plan = BackwardPlan<C>;
  float dk[C::kHeadDim / 2];
  float dv[C::kHeadDimV / 2];
#pragma unroll
  for (float& x : dk) x = 0.0f;
#pragma unroll
  for (float& x : dv) x = 0.0f;
  await_keys<C>(p, work, shared, ptx::thread_index() - ptx::kWarpgroupSize);
  walk_by_keys<C>(p, work, shared, warpgroup, warp, dk, dv);
  ptx::griddepcontrol_launch_dependents();

  if (p.key_flags.data != nullptr && ptx::any(!all_finite(dk) || !all_finite(dv)) &&
      ptx::lane_index() == 0) {
    p.key_flags.data[KeyWork<C>::index()] = 1;
  }
  ptx::bar_sync(kMath, Plan::kMathThreads);  // nobody reads K and V any more
  const int first = warpgroup * 64 + warp * 16;
  const KvSource source = gradient_source(p.problem, work.sequence);
  store_keys<C, typename Plan::VTile>(dv, 1.0f, shared + Plan::kV, p.gradients.dv, work, source,
                                      first, p.problem.head_dim_v);
  store_keys<C, typename Plan::KTile>(dk, score_of(p.problem).scale, shared + Plan::kK,
                                      p.gradients.dk, work, source, first, p.problem.head_dim);
}

}  // namespace tilewise::cuda::wgmma
