// The main kernel of the backward on Hopper (sm_90a): FlashAttention-2 (arXiv 2307.08691, algorithm
// 2) on TMA and wgmma. backward_prepare.cuh runs before it, backward_finish.cuh after it.
//
// A work tile is a tile of keys of one key/value head. Its CTA walks the query tiles that see these
// keys, in one query head of the group after the other, and a step is one query tile. With head
// dims up to 128 ("by keys") the grid is persistent, except in deterministic calls (plan.cpp);
// above ("by columns") a CTA or a cluster of two CTAs computes one work tile. The roles in a CTA:
//
//   producer warp              loads by TMA                               backward_producer.h
//   two consumer warpgroups    compute the five products of a step       backward_by_keys.cuh
//                                                                        backward_by_columns.cuh
//   two reduction warps        by keys: add dQ from shared memory to     backward_reduce.h
//                              dq_sum (by columns: the consumers do)
//   mask warp                  (masked form, by keys) finds what the     backward_mask_reader.h
//                              mask shows
//
//   what passes   from       to          stages   barriers (backward_plan.h)
//   descriptor    producer   all         4 or 1   descriptor_full; kv_empty
//   K, V          producer   consumers   1        k_full, v_full; kv_empty
//   Q, lse        producer   consumers   2        q_full; q_empty
//   dO, delta     producer   consumers   2 or 1   dout_full; dout_empty
//   dQ            consumers  reduction   1        kDqFull; kDqEmpty (named barriers)
//   mask windows  mask warp  all         8        window_full; window_empty (mask_shared.h)
//   mask bits     mask warp  consumers   4        bits_full; bits_empty
//
// The timeline of a work tile of three steps (' marks the next work tile):
//
//   producer    descriptor | Q0 dO0 | K V | Q1 dO1 | Q2 dO2 | descriptor' | Q0' dO0' | K' V'
//   consumers                             | step 0 | step 1 | step 2 | dK, dV to memory | step 0'
//   reduction                                      | dQ0    | dQ1    | dQ2
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/wgmma/backward_by_columns.cuh"
#include "cuda/wgmma/backward_by_keys.cuh"
#include "cuda/wgmma/backward_mask_reader.h"
#include "cuda/wgmma/backward_producer.h"
#include "cuda/wgmma/backward_reduce.h"

namespace tilewise::cuda::wgmma {

template <class C>
inline constexpr int kBackwardSharedBytes = BackwardPlan<C>::kSharedBytes;

// Barrier of the CTA, or of both CTAs of its cluster.
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
  if (ptx::thread_index() == 0) {
    if constexpr (C::kMasked) typename Plan::MaskRegion{shared}.init_barriers();
    BackwardBarriers{shared + Plan::kBarriers}.init(kConsumerWarps, Plan::kReductionWarps,
                                                    Plan::kEmptyArrivals, Plan::kDescriptorStages);
  }
  sync_all<C>();

  const int warp = ptx::uniform(ptx::warp_index());
  if (warp < 4) {
    ptx::setmaxnreg_dec<C::kBackward.producer_registers>();
    if (warp == 0) producer_role<C>(p, shared);
    if constexpr (!kByColumns<C>) {
      if (warp == 1 || warp == 2) reduction_role<C>(p, shared, warp - 1);
      if constexpr (C::kMasked) {
        if (warp == 3) BackwardMaskReader<C>(p, shared).run();
      }
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
      if constexpr (C::kGeneral) {
        ptx::griddepcontrol_wait();  // for far_rows
        const Option option = common::has_far_rows(p) ? Option::any : option_of(p.problem);
        run_with_option<C::kBackward.option_loops>(option, role);
      } else {
        role.template run<Option::none>();
      }
    }
  }
  // A CTA may not exit while its peer can still access its shared memory.
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
