// The warps that send dQ: one per math warpgroup takes what it has staged in shared memory and adds
// it to the sums in memory.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_work.h"

namespace tilewise::cuda::wgmma {

// The part of a tile of a warpgroup, by one thread. Shared memory is free when it returns.
TILEWISE_DEVICE void send(float* to, ptx::SharedAddress from, int bytes) {
  ptx::cp_reduce_async_bulk_add_f32(to, from, bytes, ptx::CachePolicy::evict_last);
  ptx::cp_async_bulk_commit_group();
  ptx::cp_async_bulk_wait_group_read<0>();
}

// Deterministic sums: key tiles add to a tile of rows in turn. By one thread; without turns
// nothing.
//
// A turn ends when its additions have arrived in memory. Shared memory is free for the next ones
// before that: whoever stages those does not wait for it.
struct SendTurns {
  int32_t* turns;           // [tiles of rows]; null: none are wanted
  int32_t* last = nullptr;  // that has not ended

  // Both warpgroups count: a tile of rows has had 2 n additions after n key tiles.
  TILEWISE_DEVICE void begin(int32_t tile, int32_t before) {
    if (turns == nullptr) return;
    end();
    last = turns + tile;
    while (ptx::ld_acquire(last) < 2 * before) {
    }
  }
  TILEWISE_DEVICE void end() {
    if (last == nullptr) return;
    ptx::cp_async_bulk_wait_group<0>();
    ptx::fence_proxy_async_all();
    ptx::red_release_add_s32(last, 1);
    last = nullptr;
  }
};

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
  const bool speaks = ptx::lane_index() == 0;
  SendTurns additions{p.dq_semaphores};
  ptx::griddepcontrol_wait();  // for the zeros that are added to
#pragma unroll 1
  for (int32_t piece = 0;; ++piece) {
    const int slot = piece % Plan::kRecordSlots;
    ptx::mbarrier_wait_parity(barriers.record_landed(slot), piece / Plan::kRecordSlots & 1);
    const TileDescriptor& work = received_work<C>(slot);
    const int32_t steps = work.steps;
    if (steps < 0) break;
    RowWalk walk(work);
    const Turns<C> turns(p, work);
    await_landing(barriers, piece & 1);
    ptx::sync_warp();
    if (speaks) ptx::mbarrier_arrive(barriers.keys_left());
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      ptx::bar_arrive(kDqTaken + warpgroup, kDqThreads);
      if (speaks) additions.begin(walk.index, turns.at(walk.row));
      ptx::sync_warp();
      ptx::bar_sync(kDqStaged + warpgroup, kDqThreads);
      if (speaks) send(to + int64_t{walk.index} * Plan::kDqTile, from, bytes);
      ptx::sync_warp();
      walk.advance(Plan::kQueries);
    }
  }
  if (!speaks) return;
  additions.end();
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace tilewise::cuda::wgmma
