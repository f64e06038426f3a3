// The forward on Hopper (sm_90a): FlashAttention-3's schedule (arXiv 2407.08608) on TMA and wgmma.
//
// A grid of as many blocks as multiprocessors walks the tiles of queries (`works`). In a block:
//
//   dealing warp    finds the next work_tile and writes it down          forward_deal.h
//   loading warp    brings Q, and K and V a key tile at a time      forward_load.h
//   math warpgroup  (2 to 4) 64 rows of the tile each               forward_math.h
//
//   what passes     from      to        slots      the facts (mbarriers of forward_shared.h)
//   work_tile            dealing   all       4          tile_located, tile_full, tile_empty
//   Q               loading   math      q_buffers  q_full, q_empty
//   K, V            loading   math      stages     k_full, k_empty; v_full, v_empty
//
// In time, key tiles from the last to the first (P stays in registers, V is one step behind K):
//
//   loading   Q K3 K2 V3 K1 V2 K0 V1 | Q' K3' V0 K2' V3' ...
//   products     S3   S2 O3   S1 O2   S0 O1 | S3' O0  S2' O3' ...     Sn = Q Kn^T, On += Pn Vn
//   softmax         P3     P2      P1      P0 | P3' out   P2' ...
//
// With `overlap_tiles` the first scores of the next work_tile (') go beside the last values of this
// one, and the results leave while the tensor cores are busy; otherwise V0 comes before Q'.
// Warpgroups skip key tiles that only the others see, and mask those that the band cuts.
#pragma once

#include "cuda/common/trigger_dependents.h"
#include "cuda/wgmma/forward_consumer.h"
#include "cuda/wgmma/forward_producer.h"
#include "cuda/wgmma/forward_scheduler.h"

namespace tilewise::cuda::wgmma {

template <class C>
inline constexpr int kForwardSharedBytes = ForwardShared<C>::kBytes;

template <class C>
struct ForwardConsumerRole {
  const TmaForwardParams& p;
  const ForwardShared<C>& shared;
  int warpgroup;
  int32_t& recompute_head;

  template <Option kOption>
  TILEWISE_DEVICE void run() const {
    recompute_head = ForwardConsumer<C, kOption>(p, shared, warpgroup).run();
  }
};

template <class C>
TILEWISE_KERNEL(C::kForward.threads(), 1)
void forward(TILEWISE_PARAMETER TmaForwardParams p) {
  const ForwardShared<C> shared = ForwardShared<C>::of();
  const int warpgroup = ptx::uniform(ptx::thread_index() / ptx::kWarpgroupSize);
  common::trigger_dependents(p, PdlTrigger::after_first_loads);
  // All pass one barrier, whose place in the code is the same for all. The first work_tile is found
  // before it: a GPU that has just started waits for instructions more than for anything.
  ForwardProducer<C> producer(p, shared);
  ForwardScheduler<C> scheduler(p, shared);
  const int warp = ptx::uniform(ptx::warp_index());
  if (warp == 0) producer.begin();
  if (warp == 1) scheduler.begin();
  ptx::sync_block();
  if (warpgroup == 0) [[likely]] {
    ptx::setmaxnreg_dec<C::kForward.producer_registers>();
    if (warp == 0)
      producer.run();
    else if (warp == 1)
      scheduler.run();
  } else {
    ptx::setmaxnreg_inc<C::kForward.consumer_registers>();
    int32_t recompute_head = NanRecompute<C>::kNone;
    const ForwardConsumerRole<C> role{p, shared, warpgroup - 1, recompute_head};
    if (!C::kGeneral || option_of(p.problem) == Option::none)
      role.template run<Option::none>();
    else if constexpr (C::kGeneral)
      run_with_option<C::kForward.option_loops>(p.problem, role);
    if (recompute_head != NanRecompute<C>::kNone) [[unlikely]]
      NanRecompute<C>(p, ptx::warp_index() - 4).run(recompute_head);
  }
}

}  // namespace tilewise::cuda::wgmma
