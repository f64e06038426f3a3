// The consumer warpgroups of the backward kernel for head dims above 128. Each has some of the
// columns of the head. In a step (one query tile) the named barriers order the two warpgroups:
//
//   warpgroup 0                            warpgroup 1
//   S = Q K^T
//   ---------------------------------------- kScoresIssued (0 -> 1)
//                                          dP = dO V^T
//   P = exp(S - lse) to shared memory
//   ---------------------------------------- kPStored (0 -> 1)
//                                          dS = P (dP - delta) to shared memory
//   dV += P dO                             dV += P dO
//   ---------------------------------------- kDsStored (1 -> 0)
//   dQ = dS K to dq_sum, dK += dS Q        dQ = dS K to dq_sum, dK += dS Q
//
//   descriptor_full, k_full, v_full        mbarriers; the producer warp fills each once
//   q_full, q_empty; dout_full, dout_empty mbarriers; Q and lse, dO and delta of a stage
//   peer_ds_full, peer_ds_empty            mbarriers; dS between the CTAs of a cluster
//   kPRead                                 (1 -> 0) in a cluster, P may be overwritten
//   kWarpgroupStored                       all warps of a warpgroup have stored P, dS, dK or dV
//   kKeysRead                              (both ways) dK and dV may overwrite K and V
//
// The timeline of a step without a cluster (the last dK runs beside the next S or dP):
//
//   products 0   S            dV     dQ dK | S'
//   softmax 0       P                  dQ to L2
//   products 1      dP            dV    dQ dK | dP'
//   softmax 1           dS               dQ to L2
//
// The two CTAs of a cluster own neighbouring keys. Each sends its dS to the other, and sums half of
// the columns of dQ over the keys of both.
//
// dV, dK and dQ are transposed: a row of these accumulators is a column of the head. In the general
// form warpgroup 0 also stores the derivative of P with respect to the product; dS replaces it.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/wgmma/backward_column_consumer.h"
#include "cuda/wgmma/backward_column_scores.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

// The state of a consumer warpgroup, and the parts of its steps.
template <class C, int kWarpgroup>
struct ColumnConsumer {
  using Plan = BackwardPlan<C>;

  const BackwardBarriers barriers;
  const ColumnProducts<C, kWarpgroup> products;
  const ColumnScores<C> scores;
  const DqReduction<C> reduction;
  const int first_dq_panel;
  const int peer;  // rank of the other CTA
  ptx::SharedAddress shared;

  TILEWISE_DEVICE ColumnConsumer(const TmaBackwardParams& params, const TileDescriptor& work_tile,
                                 ptx::SharedAddress block, int warp, int panel)
      : barriers{block + Plan::kBarriers},
        products(block, panel),
        scores(params, work_tile, block, warp),
        reduction(params, work_tile, warp),
        first_dq_panel(panel),
        peer(static_cast<int>(ptx::block_index() % Plan::kCluster) ^ 1),
        shared(block) {}

  TILEWISE_DEVICE static bool is_elected() { return ptx::lane_index() == 0; }
  // Releases a stage of Q or dO. Threads that have read its statistics arrive themselves; in the
  // other warpgroup one lane per warp arrives.
  TILEWISE_DEVICE static void release(ptx::SharedAddress empty, bool reads_statistics) {
    if (reads_statistics || is_elected()) ptx::mbarrier_arrive(empty);
  }

  // Adds dq and dk of a step, over the keys of this CTA. The last dk product is in flight when it
  // returns.
  TILEWISE_DEVICE void add_dq_dk(ColumnSums<C, kWarpgroup>& sums, const RowWalk& walk,
                                 int stage) const {
    constexpr bool kTwoDq = Plan::dq_panels(kWarpgroup) > 1;
    constexpr bool kTwoDk = Plan::dk_panels(kWarpgroup) > 1;
    float dq[32];
    products.start_dq(dq, stage);
    products.add_dk(sums.dk[0], 0, stage);
    ptx::wgmma_wait_group<1>();
    release(barriers.dout_empty(0), kWarpgroup == 1);
    ptx::fence_register(dq);
    reduction.acquire(walk);
    reduction.add(dq, walk, first_dq_panel);
    if constexpr (kTwoDq) products.restart_dq(dq, stage);
    if constexpr (kTwoDk) products.add_dk(sums.dk[1], 1, stage);
    if constexpr (kTwoDq) {
      ptx::wgmma_wait_group<kTwoDk ? 1 : 0>();
      ptx::fence_register(dq);
      reduction.add(dq, walk, first_dq_panel + 1);
    }
    reduction.release(walk);
  }

  // Sends dS to the other CTA. A step calls it before it issues its next product.
  TILEWISE_DEVICE void send_ds() const {
    ptx::bar_sync(kWarpgroupStored + 1, ptx::kWarpgroupSize);
    if (ptx::thread_index() % ptx::kWarpgroupSize != 0) return;
    constexpr int kBytes = Plan::ScoreTile::kBytes;
    ptx::mbarrier_arrive_expect_tx(barriers.peer_ds_full(), kBytes);
    ptx::cp_async_bulk_to_rank(ptx::map_to_rank(shared + Plan::kPeerDs, peer), shared + Plan::kDs,
                               kBytes, ptx::map_to_rank(barriers.peer_ds_full(), peer));
  }

  // In a cluster: adds dk of a step over the keys of this CTA, and half of the columns of dq over
  // the keys of both CTAs.
  TILEWISE_DEVICE void add_dq_dk_in_cluster(ColumnSums<C, kWarpgroup>& sums, const RowWalk& walk,
                                            int stage, bool last) const {
    float dq[32];
    products.add_dk(sums.dk[0], 0, stage);
    products.add_dk(sums.dk[1], 1, stage);
    products.start_own_dq(dq);
    ptx::mbarrier_wait_parity(barriers.peer_ds_full(), stage);
    products.add_peer_dq(dq);
    ptx::wgmma_wait_group<2>();
    release(barriers.dout_empty(0), kWarpgroup == 1);
    ptx::wgmma_wait_group<0>();
    ptx::fence_register(dq);
    if (kWarpgroup == 1 && !last) ptx::bar_arrive(kPRead, Plan::kConsumerThreads);
    if (is_elected()) ptx::mbarrier_arrive_remote(ptx::map_to_rank(barriers.peer_ds_empty(), peer));
    release(barriers.q_empty(stage), kWarpgroup == 0);
    reduction.acquire(walk);
    reduction.add(dq, walk, first_dq_panel);
    reduction.release(walk);
  }
};

template <class C, int kWarpgroup>
TILEWISE_DEVICE void mainloop_by_columns(const TmaBackwardParams& params,
                                         const TileDescriptor& work_tile, ptx::SharedAddress shared,
                                         int warp, ColumnSums<C, kWarpgroup>& sums) {
  using Plan = BackwardPlan<C>;
  constexpr bool kSingleCta = Plan::kCluster == 1;
  const int first_dq_panel =
      kSingleCta ? Plan::first_dq_panel(kWarpgroup)
                 : 2 * static_cast<int>(ptx::block_index() % Plan::kCluster) + kWarpgroup;
  const ColumnConsumer<C, kWarpgroup> consumer(params, work_tile, shared, warp, first_dq_panel);
  const BackwardBarriers& barriers = consumer.barriers;
  RowWalk walk(work_tile);
  // In a register, because a read from shared memory would wait behind the products.
  const int32_t steps = work_tile.steps;
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    // Q has two stages. dO and the peer's dS have one, so that their parity in a step is `stage`.
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    float s[Plan::kKeys / 2];  // S (warpgroup 0) or dP (warpgroup 1)

    // Warpgroup 0 issues first, because both wait for P, which it computes.
    if constexpr (kWarpgroup == 0)
      ptx::mbarrier_wait_parity(barriers.q_full(stage), parity);
    else
      ptx::mbarrier_wait_parity(barriers.dout_full(0), stage);
    const RowStatistic statistic = consumer.scores.template statistic<kWarpgroup>(stage);
    if constexpr (kWarpgroup == 1) ptx::bar_sync(kScoresIssued, Plan::kConsumerThreads);
    consumer.products.start_scores(s, stage);
    if constexpr (kWarpgroup == 0) ptx::bar_arrive(kScoresIssued, Plan::kConsumerThreads);
    if constexpr (kSingleCta) {
      ptx::wgmma_wait_group<1>();  // the last dk of the previous step
      if (step > 0) consumer.release(barriers.q_empty(stage ^ 1), kWarpgroup == 0);
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_register(s);
    if constexpr (kWarpgroup == 0) {
      if (!kSingleCta && step > 0) ptx::bar_sync(kPRead, Plan::kConsumerThreads);
      if (!kSingleCta && C::kGeneral)
        ptx::mbarrier_wait_parity(barriers.peer_ds_empty(), stage ^ 1);
      consumer.scores.store_p(params, s, statistic, walk, stage);
      ptx::bar_arrive(kPStored, Plan::kConsumerThreads);
      ptx::bar_sync(kWarpgroupStored, ptx::kWarpgroupSize);
      ptx::mbarrier_wait_parity(barriers.dout_full(0), stage);
    } else {
      ptx::bar_sync(kPStored, Plan::kConsumerThreads);
      if (!kSingleCta) ptx::mbarrier_wait_parity(barriers.peer_ds_empty(), stage ^ 1);
      consumer.scores.store_ds(s, statistic, stage);
      ptx::bar_arrive(kDsStored, Plan::kConsumerThreads);
      if constexpr (!kSingleCta) consumer.send_ds();
      ptx::mbarrier_wait_parity(barriers.q_full(stage), parity);
    }

    consumer.products.add_dv(sums.dv, stage);  // dV += P^T dO
    if constexpr (kWarpgroup == 0)
      ptx::bar_sync(kDsStored, Plan::kConsumerThreads);
    else if constexpr (kSingleCta)
      ptx::bar_sync(kWarpgroupStored + 1, ptx::kWarpgroupSize);
    if constexpr (kSingleCta)
      consumer.add_dq_dk(sums, walk, stage);
    else
      consumer.add_dq_dk_in_cluster(sums, walk, stage, step + 1 == steps);
    walk.advance(Plan::kQueries);
  }
  ptx::wgmma_wait_group<0>();
  sums.fence();
}

// Called by both warpgroups before their code differs: waits for the descriptor and prepares
// its keys.
template <class C>
TILEWISE_DEVICE void begin_by_columns(const TmaBackwardParams& p, ptx::SharedAddress shared) {
  ptx::griddepcontrol_wait();  // for the zeros in dq_sum
  const BackwardBarriers barriers{shared + BackwardPlan<C>::kBarriers};
  ptx::mbarrier_wait_parity(barriers.descriptor_full(0), 0);
  const TileDescriptor& work_tile = tile_descriptor<C>(0);
  if (work_tile.steps > 0)
    prepare_kv<C>(p, work_tile, shared, ptx::thread_index() - ptx::kWarpgroupSize, 0);
}

template <class C, int kWarpgroup>
TILEWISE_DEVICE void by_columns_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                                     int warp) {
  using Plan = BackwardPlan<C>;
  const TileDescriptor& work_tile = tile_descriptor<C>(0);
  ColumnSums<C, kWarpgroup> sums;
  sums.clear();
  mainloop_by_columns<C, kWarpgroup>(p, work_tile, shared, warp, sums);
  ptx::griddepcontrol_launch_dependents();

  if (p.key_flags.data != nullptr && ptx::any(!sums.finite()) && ptx::lane_index() == 0)
    p.key_flags.data[work_tile.index] = 1;
  // No warp of this warpgroup reads K and V any more. Each warpgroup arrives at the barrier of the
  // other and waits at its own, because synccheck rejects a barrier that threads reach at different
  // places of the code.
  ptx::bar_arrive(kKeysRead + (kWarpgroup ^ 1), Plan::kConsumerThreads);
  ptx::bar_sync(kKeysRead + kWarpgroup, Plan::kConsumerThreads);
  const float scale = score_of(p.problem).scale;
  const typename Plan::KTile k{shared + Plan::kK};
  const typename Plan::VTile v{shared + Plan::kV};
#pragma unroll
  for (int i = 0; i < Plan::dv_panels(kWarpgroup); ++i)
    write_columns<C>(sums.dv[i], 1.0f, v, Plan::first_dv_panel(kWarpgroup) + i, warp);
#pragma unroll
  for (int i = 0; i < Plan::dk_panels(kWarpgroup); ++i)
    write_columns<C>(sums.dk[i], scale, k, Plan::first_dk_panel(kWarpgroup) + i, warp);
  ptx::bar_sync(kWarpgroupStored + kWarpgroup, ptx::kWarpgroupSize);
  store_panels<C>(v, p.gradients.dv, work_tile.dv, work_tile.key_count,
                  Plan::first_dv_panel(kWarpgroup), Plan::dv_panels(kWarpgroup),
                  p.problem.head_dim_v);
  store_panels<C>(k, p.gradients.dk, work_tile.dk, work_tile.key_count,
                  Plan::first_dk_panel(kWarpgroup), Plan::dk_panels(kWarpgroup),
                  p.problem.head_dim);
}

}  // namespace tilewise::cuda::wgmma
