// The warps that send dQ: one per math warpgroup takes what it has staged in shared memory and adds
// it to the sums in memory.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_work.h"

namespace tilewise::cuda::wgmma {

// The part of a tile of a warpgroup, by one thread. Shared memory is free when it returns.
template <class C>
TILEWISE_DEVICE void send(const TmaBackwardParams& p, float* to, ptx::SharedAddress from, int bytes,
                          const RowWalk& walk, const Turns<C>& turns) {
  constexpr ptx::CachePolicy kPolicy = ptx::CachePolicy::evict_last;
  if (p.turns == nullptr) {
    ptx::cp_reduce_async_bulk_add_f32(to, from, bytes, kPolicy);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    return;
  }
  // Both warpgroups count: a tile of rows has had 2 n additions after n key tiles.
  int32_t* const turn = p.turns + walk.index;
  const int32_t mine = 2 * turns.at(walk.row);
  while (ptx::ld_acquire(turn) < mine) {
  }
  ptx::cp_reduce_async_bulk_add_f32(to, from, bytes, kPolicy);
  ptx::cp_async_bulk_commit_group();
  ptx::cp_async_bulk_wait_group<0>();
  ptx::fence_proxy_async_all();
  ptx::red_release_add_s32(turn, 1);
}

template <class C>
TILEWISE_DEVICE void send_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                               int warpgroup) {
  using Plan = BackwardPlan<C>;
  constexpr int kOwn = 4 * Plan::kDqPartBytes;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const int begin = warpgroup * kOwn;
  const int bytes = min(kOwn, Plan::kDqParts * Plan::kDqPartBytes - begin);
  const ptx::SharedAddress from = shared + static_cast<uint32_t>(Plan::kDq + begin);
  float* const to = p.dq_sum + begin / 4;
  ptx::griddepcontrol_wait();  // for the zeros that are added to
#pragma unroll 1
  for (int32_t piece = 0;; ++piece) {
    const int slot = piece % Plan::kRecordSlots;
    ptx::mbarrier_wait_parity(barriers.record_landed(slot), piece / Plan::kRecordSlots & 1);
    const KeyRecord& work = received_work<C>(slot);
    const int32_t steps = work.steps;
    if (steps < 0) break;
    RowWalk walk(work);
    const Turns<C> turns(p, work);
    await_landing(barriers, piece & 1);
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barriers.keys_left());
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      ptx::bar_arrive(kDqTaken + warpgroup, kDqThreads);
      ptx::bar_sync(kDqStaged + warpgroup, kDqThreads);
      if (ptx::lane_index() == 0)
        send<C>(p, to + int64_t{walk.index} * Plan::kDqTile, from, bytes, walk, turns);
      ptx::sync_warp();
      walk.advance(Plan::kQueries);
    }
  }
  if (ptx::lane_index() == 0) ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace tilewise::cuda::wgmma
