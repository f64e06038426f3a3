// The math warpgroups of head dims above 128: each has some of the columns of the head.
//
//   warpgroup 0                        warpgroup 1
//   s = Q K^T                          dp = dO V^T
//   p = exp(s - lse) to shared memory
//   ------------------------------------ p_stored
//                                      ds = p (dp - delta) to shared memory
//   dv += p dO                         dv += p dO
//   ------------------------------------ barrier: ds is in shared memory
//   dq = ds K to memory, dk += ds Q    dq = ds K to memory, dk += ds Q
//
// dv, dk and dq are transposed: a row of the sums is a column of the head. In the general form
// warpgroup 0 also stores the derivative of p with respect to the product, where ds will lie.
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/wgmma/backward_column_math.h"
#include "cuda/wgmma/backward_column_scores.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_work.h"

namespace tilewise::cuda::wgmma {

template <class C, int kWarpgroup>
TILEWISE_DEVICE void walk_by_columns(const TmaBackwardParams& params, const KeyWork<C>& work,
                                     ptx::SharedAddress shared, int warp,
                                     ColumnSums<C, kWarpgroup>& sums) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const ColumnProducts<C, kWarpgroup> products(shared);
  const ColumnScores<C> scores(params, work, shared, warp);
  const DqReduction<C> reduction(params, work, warp);
  const bool speaker = ptx::lane_index() == 0;
  RowWalk walk = work.walk(params.problem);
#pragma unroll 1
  for (int32_t step = 0; step < work.steps; ++step) {
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    float s[Plan::kKeys / 2];
    float dq[32];

    // Warpgroup 0 first: p is what both wait for.
    if constexpr (kWarpgroup == 0)
      ptx::mbarrier_wait_parity(barriers.q_landed(stage), parity);
    else
      ptx::mbarrier_wait_parity(barriers.dout_landed(0), stage);
    const RowStatistic statistic = scores.template statistic<kWarpgroup>(stage);
    if constexpr (kWarpgroup == 1) ptx::bar_sync(kScoresIssued, Plan::kMathThreads);
    products.start_scores(s, stage);
    if constexpr (kWarpgroup == 0) ptx::bar_arrive(kScoresIssued, Plan::kMathThreads);
    ptx::wgmma_wait_group<1>();  // the last dk of the step before
    if (speaker && step > 0) ptx::mbarrier_arrive(barriers.q_read(stage ^ 1));
    ptx::wgmma_wait_group<0>();
    ptx::keep(s);
    if constexpr (kWarpgroup == 0) {
      scores.store_p(params.problem, s, statistic, walk, stage);
      ptx::bar_arrive(kPStored, Plan::kMathThreads);
      ptx::bar_sync(kOwnStored, ptx::kWarpgroupSize);
      ptx::mbarrier_wait_parity(barriers.dout_landed(0), stage);
    } else {
      ptx::bar_sync(kPStored, Plan::kMathThreads);
      scores.store_ds(s, statistic, stage);
      ptx::mbarrier_wait_parity(barriers.q_landed(stage), parity);
    }

    products.add_dv(sums.dv, stage);
    ptx::bar_sync(kMath, Plan::kMathThreads);
    products.start_dq(dq, stage);
    products.add_dk(sums.dk[0], 0, stage);
    ptx::wgmma_wait_group<1>();
    if (speaker) ptx::mbarrier_arrive(barriers.dout_read(0));
    ptx::keep(dq);
    reduction.await_turn(walk);
    reduction.add(dq, walk, Plan::first_dq(kWarpgroup));
    if constexpr (Plan::own_dq(kWarpgroup) > 1) products.restart_dq(dq, stage);
    if constexpr (Plan::own_dk(kWarpgroup) > 1) products.add_dk(sums.dk[1], 1, stage);
    if constexpr (Plan::own_dq(kWarpgroup) > 1) {
      ptx::wgmma_wait_group<(Plan::own_dk(kWarpgroup) > 1) ? 1 : 0>();
      ptx::keep(dq);
      reduction.add(dq, walk, Plan::first_dq(kWarpgroup) + 1);
    }
    reduction.pass_turn(walk);
    walk.advance(Plan::kQueries);
  }
  ptx::wgmma_wait_group<0>();
  sums.keep();
}

template <class C, int kWarpgroup>
TILEWISE_DEVICE void by_columns_role(const TmaBackwardParams& p, const KeyWork<C>& work,
                                     ptx::SharedAddress shared, int warp) {
  using Plan = BackwardPlan<C>;
  await_keys<C>(p, work, shared, ptx::thread_index() - ptx::kWarpgroupSize);
  ptx::griddepcontrol_wait();  // for the zeros that dq is added to
  ColumnSums<C, kWarpgroup> sums;
  sums.clear();
  walk_by_columns<C, kWarpgroup>(p, work, shared, warp, sums);
  ptx::griddepcontrol_launch_dependents();

  if (p.key_flags.data != nullptr && ptx::any(!sums.finite()) && ptx::lane_index() == 0)
    p.key_flags.data[ptx::block_index()] = 1;
  ptx::bar_sync(kMath, Plan::kMathThreads);  // nobody reads K and V any more
  const float scale = score_of(p.problem).scale;
  const typename Plan::KTile k{shared + Plan::kK};
  const typename Plan::VTile v{shared + Plan::kV};
#pragma unroll
  for (int i = 0; i < Plan::own_dv(kWarpgroup); ++i)
    stage_columns<C>(sums.dv[i], 1.0f, v, Plan::first_dv(kWarpgroup) + i, warp);
#pragma unroll
  for (int i = 0; i < Plan::own_dk(kWarpgroup); ++i)
    stage_columns<C>(sums.dk[i], scale, k, Plan::first_dk(kWarpgroup) + i, warp);
  ptx::bar_sync(kOwnStored + kWarpgroup, ptx::kWarpgroupSize);
  const KvSource source = gradient_source(p.problem, work.sequence);
  store_panels<C>(v, p.gradients.dv, work, source, Plan::first_dv(kWarpgroup),
                  Plan::own_dv(kWarpgroup), p.problem.head_dim_v);
  store_panels<C>(k, p.gradients.dk, work, source, Plan::first_dk(kWarpgroup),
                  Plan::own_dk(kWarpgroup), p.problem.head_dim);
}

}  // namespace tilewise::cuda::wgmma
