// The backward of FlashAttention-2 (arXiv 2307.08691, algorithm 2) on warpgroup products. A block
// owns a tile of keys of one key/value head and walks the tiles of queries that see it, in one
// query head of the group after the other:
//
//   load warp        record | Q, lse -> q_full    dO, delta -> dout_full    K, V    by TMA
//   math warpgroups  s, dp -> p, ds -> dv, dq, dk    -> q_empty, dout_empty         two
//                    backward_by_keys.cuh, backward_by_columns.cuh
//   send warps       dq from shared memory to dq_sum by bulk reduce-add           one each
//                    (by columns it goes there from registers)
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/wgmma/backward_by_columns.cuh"
#include "cuda/wgmma/backward_by_keys.cuh"
#include "cuda/wgmma/backward_producer.h"
#include "cuda/wgmma/backward_reduce.h"

namespace tilewise::cuda::wgmma {

template <class C>
inline constexpr int kBackwardSharedBytes = BackwardPlan<C>::kSharedBytes;

// The block meets the other one of its cluster.
template <class C>
TILEWISE_DEVICE void sync_all() {
  if constexpr (BackwardPlan<C>::kCluster == 1)
    ptx::sync_block();
  else
    ptx::sync_cluster();
}

template <class C>
TILEWISE_DEVICE void backward_block(const TmaBackwardParams& p) {
  using Plan = BackwardPlan<C>;
  constexpr int kConsumerWarps = Plan::kConsumerThreads / ptx::kWarpSize;
  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  if (ptx::thread_index() == 0)
    BackwardBarriers{shared + Plan::kBarriers}.init(kConsumerWarps, Plan::kReductionWarps,
                                                    Plan::kEmptyArrivals, Plan::kDescriptorStages);
  sync_all<C>();

  const int warp = ptx::uniform(ptx::warp_index());
  if (warp < 4) {
    ptx::setmaxnreg_dec<C::kBackward.producer_registers>();
    if (warp == 0) producer_role<C>(p, shared);
    if constexpr (!kByColumns<C>) {
      if (warp == 1 || warp == 2) reduction_role<C>(p, shared, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<C::kBackward.consumer_registers>();
    if constexpr (kByColumns<C>) {
      begin_by_columns<C>(p, shared);
      if (warp < 8)
        by_columns_role<C, 0>(p, shared, warp % 4);
      else
        by_columns_role<C, 1>(p, shared, warp % 4);
    } else {
      const ByKeysRole<C> role{p, shared, warp / 4 - 1, warp % 4};
      if constexpr (C::kGeneral)
        run_with_option<C::kBackward.option_loops>(p.problem, role);
      else
        role.template run<Option::none>();
    }
  }
  // Nobody leaves whose shared memory the other block may still reach.
  if constexpr (Plan::kCluster > 1) ptx::sync_cluster();
}

template <class C>
  requires(C::kBackward.cluster_size == 1)
TILEWISE_KERNEL(C::kBackward.threads(), 1)
void backward(TILEWISE_PARAMETER TmaBackwardParams p) {
  backward_block<C>(p);
}

template <class C>
  requires(C::kBackward.cluster_size > 1)
TILEWISE_CLUSTER_KERNEL(C::kBackward.threads(), C::kBackward.cluster_size)
void backward(TILEWISE_PARAMETER TmaBackwardParams p) {
  backward_block<C>(p);
}

}  // namespace tilewise::cuda::wgmma
