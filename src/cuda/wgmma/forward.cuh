// The forward on Hopper (sm_90a): FlashAttention-3's schedule (arXiv 2407.08608) on TMA and wgmma.
#pragma once

#include "cuda/wgmma/forward_deal.h"
#include "cuda/wgmma/forward_load.h"
#include "cuda/wgmma/forward_math.h"

namespace tilewise::cuda::wgmma {

template <class C>
inline constexpr int kForwardSharedBytes = ForwardShared<C>::kBytes;

template <class C>
TILEWISE_KERNEL(C::kForward.threads(), 1)
void forward(TILEWISE_PARAMETER TmaForwardParams p) {
  const ForwardShared<C> shared = ForwardShared<C>::of();
  const int warpgroup = ptx::uniform(ptx::thread_index() / ptx::kWarpgroupSize);
  if (ptx::thread_index() == 0) {
    shared.init_barriers();
    ptx::prefetch_tensormap(p.q);
    ptx::prefetch_tensormap(p.k);
    ptx::prefetch_tensormap(p.v);
  }
  ptx::sync_block();
  ptx::griddepcontrol_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kForward.load_registers>();
    if (ptx::warp_index() == 0) ForwardLoad<C>(p, shared).run();
    if (ptx::warp_index() == 1) ForwardDeal<C>(p, shared).run();
  } else {
    ptx::setmaxnreg_inc<C::kForward.math_registers>();
    ForwardMath<C>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace tilewise::cuda::wgmma
