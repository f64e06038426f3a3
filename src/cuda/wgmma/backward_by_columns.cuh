// The math warpgroups of head dims above 128: each has some of the columns of the head.
//
//   warpgroup 0                        warpgroup 1
//   s = Q K^T                          dp = dO V^T
//   p = exp(s - lse) to shared memory
//   ------------------------------------ p_stored
//                                      ds = p (dp - delta) to shared memory
//   dv += p dO                         dv += p dO
//   ------------------------------------ ds_stored
//   dq = ds K to memory, dk += ds Q    dq = ds K to memory, dk += ds Q
//
// Two blocks of a cluster consumer neighbouring keys. Each sends its ds to the other one, and sums
// half of the columns of dq over the keys of both.
//
// dv, dk and dq are transposed: a row of the sums is a column of the head. In the general form
// warpgroup 0 also stores the derivative of p with respect to the product, where ds will lie.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/wgmma/backward_column_consumer.h"
#include "cuda/wgmma/backward_column_scores.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

// What the steps of a warpgroup have in common.
template <class C, int kWarpgroup>
struct ColumnConsumer {
  using Plan = BackwardPlan<C>;

  const BackwardBarriers barriers;
  const ColumnProducts<C, kWarpgroup> products;
  const ColumnScores<C> scores;
  const DqReduction<C> reduction;
  const int first_dq;  // panel
  const int peer;      // rank of the other block
  ptx::SharedAddress shared;

  TILEWISE_DEVICE ColumnConsumer(const TmaBackwardParams& params, const TileDescriptor& work_tile,
                                 ptx::SharedAddress block, int warp, int panel)
      : barriers{block + Plan::kBarriers},
        products(block, panel),
        scores(params, work_tile, block, warp),
        reduction(params, work_tile, warp),
        first_dq(panel),
        peer(static_cast<int>(ptx::block_index() % Plan::kCluster) ^ 1),
        shared(block) {}

  TILEWISE_DEVICE static bool is_elected() { return ptx::lane_index() == 0; }
  // A tile of Q or dO has been read: who has read its statistics says so himself.
  TILEWISE_DEVICE static void release(ptx::SharedAddress read, bool statistics) {
    if (statistics || is_elected()) ptx::mbarrier_arrive(read);
  }

  // dq and dk of a step, with the keys of the block. The last dk is under way when it returns.
  TILEWISE_DEVICE void add_dq_dk(ColumnSums<C, kWarpgroup>& sums, const RowWalk& walk,
                                 int stage) const {
    constexpr bool kTwoDq = Plan::own_dq(kWarpgroup) > 1;
    constexpr bool kTwoDk = Plan::own_dk(kWarpgroup) > 1;
    float dq[32];
    products.start_dq(dq, stage);
    products.add_dk(sums.dk[0], 0, stage);
    ptx::wgmma_wait_group<1>();
    release(barriers.dout_empty(0), kWarpgroup == 1);
    ptx::fence_register(dq);
    reduction.acquire(walk);
    reduction.add(dq, walk, first_dq);
    if constexpr (kTwoDq) products.restart_dq(dq, stage);
    if constexpr (kTwoDk) products.add_dk(sums.dk[1], 1, stage);
    if constexpr (kTwoDq) {
      ptx::wgmma_wait_group<kTwoDk ? 1 : 0>();
      ptx::fence_register(dq);
      reduction.add(dq, walk, first_dq + 1);
    }
    reduction.release(walk);
  }

  // dS on its way to the other block, before anything else is queued.
  TILEWISE_DEVICE void send_ds() const {
    ptx::bar_sync(kOwnStored + 1, ptx::kWarpgroupSize);
    if (ptx::thread_index() % ptx::kWarpgroupSize != 0) return;
    constexpr int kBytes = Plan::ScoreTile::kBytes;
    ptx::mbarrier_arrive_expect_tx(barriers.peer_ds_full(), kBytes);
    ptx::cp_async_bulk_to_rank(ptx::map_to_rank(shared + Plan::kPeerDs, peer), shared + Plan::kDs,
                               kBytes, ptx::map_to_rank(barriers.peer_ds_full(), peer));
  }

  // The same with the keys of both blocks: half the columns of dq, twice the keys.
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
    reduction.add(dq, walk, first_dq);
    reduction.release(walk);
  }
};

template <class C, int kWarpgroup>
TILEWISE_DEVICE void mainloop_by_columns(const TmaBackwardParams& params,
                                         const TileDescriptor& work_tile, ptx::SharedAddress shared,
                                         int warp, ColumnSums<C, kWarpgroup>& sums) {
  using Plan = BackwardPlan<C>;
  constexpr bool kSingleCta = Plan::kCluster == 1;
  const int first_dq = kSingleCta
                           ? Plan::first_dq(kWarpgroup)
                           : 2 * static_cast<int>(ptx::block_index() % Plan::kCluster) + kWarpgroup;
  const ColumnConsumer<C, kWarpgroup> consumer(params, work_tile, shared, warp, first_dq);
  const BackwardBarriers& barriers = consumer.barriers;
  RowWalk walk(work_tile);
  const int32_t steps = work_tile.steps;  // a read would wait behind the products
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    const int stage = step & 1;
    const int parity = step >> 1 & 1;
    float s[Plan::kKeys / 2];

    // Warpgroup 0 first: p is what both wait for.
    if constexpr (kWarpgroup == 0)
      ptx::mbarrier_wait_parity(barriers.q_full(stage), parity);
    else
      ptx::mbarrier_wait_parity(barriers.dout_full(0), stage);
    const RowStatistic statistic = consumer.scores.template statistic<kWarpgroup>(stage);
    if constexpr (kWarpgroup == 1) ptx::bar_sync(kScoresIssued, Plan::kConsumerThreads);
    consumer.products.start_scores(s, stage);
    if constexpr (kWarpgroup == 0) ptx::bar_arrive(kScoresIssued, Plan::kConsumerThreads);
    if constexpr (kSingleCta) {
      ptx::wgmma_wait_group<1>();  // the last dk of the step before
      if (step > 0) consumer.release(barriers.q_empty(stage ^ 1), kWarpgroup == 0);
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_register(s);
    if constexpr (kWarpgroup == 0) {
      if (!kSingleCta && step > 0) ptx::bar_sync(kPRead, Plan::kConsumerThreads);
      if (!kSingleCta && C::kGeneral)
        ptx::mbarrier_wait_parity(barriers.peer_ds_empty(), stage ^ 1);
      consumer.scores.store_p(params.problem, s, statistic, walk, stage);
      ptx::bar_arrive(kPStored, Plan::kConsumerThreads);
      ptx::bar_sync(kOwnStored, ptx::kWarpgroupSize);
      ptx::mbarrier_wait_parity(barriers.dout_full(0), stage);
    } else {
      ptx::bar_sync(kPStored, Plan::kConsumerThreads);
      if (!kSingleCta) ptx::mbarrier_wait_parity(barriers.peer_ds_empty(), stage ^ 1);
      consumer.scores.store_ds(s, statistic, stage);
      ptx::bar_arrive(kDsStored, Plan::kConsumerThreads);
      if constexpr (!kSingleCta) consumer.send_ds();
      ptx::mbarrier_wait_parity(barriers.q_full(stage), parity);
    }

    consumer.products.add_dv(sums.dv, stage);
    if constexpr (kWarpgroup == 0)
      ptx::bar_sync(kDsStored, Plan::kConsumerThreads);
    else if constexpr (kSingleCta)
      ptx::bar_sync(kOwnStored + 1, ptx::kWarpgroupSize);
    if constexpr (kSingleCta)
      consumer.add_dq_dk(sums, walk, stage);
    else
      consumer.add_dq_dk_in_cluster(sums, walk, stage, step + 1 == steps);
    walk.advance(Plan::kQueries);
  }
  ptx::wgmma_wait_group<0>();
  sums.keep();
}

// Both warpgroups, before they part: the work_tile and its keys are here.
template <class C>
TILEWISE_DEVICE void begin_by_columns(const TmaBackwardParams& p, ptx::SharedAddress shared) {
  ptx::griddepcontrol_wait();  // for the zeros that dq is added to
  const BackwardBarriers barriers{shared + BackwardPlan<C>::kBarriers};
  ptx::mbarrier_wait_parity(barriers.descriptor_full(0), 0);
  const TileDescriptor& work_tile = received_tile<C>(0);
  if (work_tile.steps > 0)
    prepare_kv<C>(p, work_tile, shared, ptx::thread_index() - ptx::kWarpgroupSize, 0);
}

template <class C, int kWarpgroup>
TILEWISE_DEVICE void by_columns_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                                     int warp) {
  using Plan = BackwardPlan<C>;
  const TileDescriptor& work_tile = received_tile<C>(0);
  ColumnSums<C, kWarpgroup> sums;
  sums.clear();
  mainloop_by_columns<C, kWarpgroup>(p, work_tile, shared, warp, sums);
  ptx::griddepcontrol_launch_dependents();

  if (p.key_flags.data != nullptr && ptx::any(!sums.finite()) && ptx::lane_index() == 0)
    p.key_flags.data[work_tile.index] = 1;
  // Nobody reads K and V any more. Each says so to the other one: synccheck takes no barrier to
  // which threads come in code of their consumer.
  ptx::bar_arrive(kKeysRead + (kWarpgroup ^ 1), Plan::kConsumerThreads);
  ptx::bar_sync(kKeysRead + kWarpgroup, Plan::kConsumerThreads);
  const float scale = score_of(p.problem).scale;
  const typename Plan::KTile k{shared + Plan::kK};
  const typename Plan::VTile v{shared + Plan::kV};
#pragma unroll
  for (int i = 0; i < Plan::own_dv(kWarpgroup); ++i)
    write_columns<C>(sums.dv[i], 1.0f, v, Plan::first_dv(kWarpgroup) + i, warp);
#pragma unroll
  for (int i = 0; i < Plan::own_dk(kWarpgroup); ++i)
    write_columns<C>(sums.dk[i], scale, k, Plan::first_dk(kWarpgroup) + i, warp);
  ptx::bar_sync(kOwnStored + kWarpgroup, ptx::kWarpgroupSize);
  store_panels<C>(v, p.gradients.dv, work_tile.dv, work_tile.key_count, Plan::first_dv(kWarpgroup),
                  Plan::own_dv(kWarpgroup), p.problem.head_dim_v);
  store_panels<C>(k, p.gradients.dk, work_tile.dk, work_tile.key_count, Plan::first_dk(kWarpgroup),
                  Plan::own_dk(kWarpgroup), p.problem.head_dim);
}

}  // namespace tilewise::cuda::wgmma
