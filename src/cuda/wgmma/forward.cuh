// The forward on Hopper (sm_90a): the schedule of FlashAttention-3 (arXiv 2407.08608) on TMA and
// wgmma.
//
// The grid is persistent: one CTA per SM computes one work tile (query rows of a head) after the
// other. The roles in a CTA:
//
//   tile scheduler warp   finds the next work tile and describes it      forward_scheduler.h
//   producer warp         loads Q, and K and V one key tile at a time    forward_producer.h
//   consumer warpgroups   (2 to 4) compute 64 rows of the tile each      forward_consumer.h
//   mask warps            (masked form) find what the mask shows         forward_mask.h
//
//   what passes   from        to         stages     mbarriers of forward_shared.h, mask_shared.h
//   work tile     scheduler   all        4          tile_located, tile_full; tile_empty
//   Q             producer    consumers  q_buffers  q_full; q_empty
//   K, V          producer    consumers  stages     k_full, v_full; k_empty, v_empty
//   mask windows  mask warps  all        8          window_full; window_empty
//   mask bits     mask warps  consumers  4          bits_full; bits_empty
//
// The timeline of four key tiles, from the last to the first (P stays in registers, V is one step
// behind K, ' marks the next work tile):
//
//   producer  Q K3 K2 V3 K1 V2 K0 V1 | Q' K3' V0 K2' V3' ...
//   products     S3   S2 O3   S1 O2   S0 O1 | S3' O0  S2' O3' ...     Sn = Q Kn^T, On += Pn Vn
//   softmax         P3     P2      P1      P0 | P3' out   P2' ...
//
// With `overlap_tiles` the first scores of the next work tile are issued beside the last PV product
// of this one, and the results are stored while the tensor cores are busy; otherwise V0 is loaded
// before Q'. Warpgroups skip key tiles that only other warpgroups see, and mask those that the band
// cuts. In the masked form all warpgroups walk the key tiles of which the CTA's rows see something.
#pragma once

#include "cuda/common/trigger_dependents.h"
#include "cuda/wgmma/forward_consumer.h"
#include "cuda/wgmma/forward_float8_consumer.h"
#include "cuda/wgmma/forward_mask.h"
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
    using Consumer = std::conditional_t<C::kFloat8, Float8Consumer<C>, ForwardConsumer<C, kOption>>;
    recompute_head = Consumer(p, shared, warpgroup).run();
  }
};

template <class C>
TILEWISE_KERNEL(C::kForward.threads(), 1)
void forward(TILEWISE_PARAMETER TmaForwardParams p) {
  const ForwardShared<C> shared = ForwardShared<C>::of_this_cta();
  const int warpgroup = ptx::uniform(ptx::thread_index() / ptx::kWarpgroupSize);
  // All roles pass one barrier at the same place of the code. The first work tile is found before
  // it, because this takes longest on a GPU that has just started: the code has to be fetched.
  ForwardProducer<C> producer(p, shared);
  ForwardScheduler<C> scheduler(p, shared);
  const int warp = ptx::uniform(ptx::warp_index());
  if (warp == 0) producer.begin();
  if (warp == 1) scheduler.begin();
  ptx::sync_block();
  // Not before scheduler.begin(), which waits for the kernel that copies cu_seqlens_q: the combine
  // kernel reads the copy before it waits for this kernel.
  common::trigger_dependents(p, PdlTrigger::after_first_loads);
  if (warpgroup == 0) [[likely]] {
    ptx::setmaxnreg_dec<C::kForward.producer_registers>();
    if (warp == 0)
      producer.run();
    else if (warp == 1)
      scheduler.run();
    else if constexpr (C::kMasked)
      ForwardMaskReader<C>(p, shared, warp - 2).run();
  } else {
    ptx::setmaxnreg_inc<C::kForward.consumer_registers>();
    int32_t recompute_head = NanRecompute<C>::kNone;
    const ForwardConsumerRole<C> role{p, shared, warpgroup - 1, recompute_head};
    if (!C::kGeneral || option_of(p.problem) == Option::none)
      role.template run<Option::none>();
    else if constexpr (C::kGeneral)
      run_with_option<C::kForward.option_loops>(option_of(p.problem), role);
    if (recompute_head != NanRecompute<C>::kNone) [[unlikely]]
      NanRecompute<C>(p, ptx::warp_index() - 4).run(recompute_head);
  }
}

}  // namespace tilewise::cuda::wgmma
