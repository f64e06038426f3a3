// Named barriers between the warps of the forward's consumer warpgroups.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

// The warp-scheduler barrier: with ping-pong, one warpgroup at a time issues products.
template <class C>
struct PingPong {
  static constexpr int kBarrier = 1;
  static constexpr int kWarpgroupBarrier = kBarrier + 4;  // one per warpgroup, for its own warps

  TILEWISE_DEVICE static void sync(int warpgroup) {
    if constexpr (C::kForward.ping_pong) ptx::bar_sync(kBarrier + warpgroup, kThreads);
  }
  TILEWISE_DEVICE static void arrive(int to) {
    if constexpr (C::kForward.ping_pong) ptx::bar_arrive(kBarrier + to, kThreads);
  }
  TILEWISE_DEVICE static void arrive_at_next(int warpgroup) {
    arrive(warpgroup + 1 == C::kForward.consumer_warpgroups ? 0 : warpgroup + 1);
  }

 private:
  static constexpr int kThreads = 2 * ptx::kWarpgroupSize;
};

}  // namespace tilewise::cuda::wgmma
