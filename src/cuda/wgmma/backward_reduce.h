// The reduction role of the backward by keys: one warp per consumer warpgroup adds the dQ that the
// warpgroup has staged in shared memory to dq_sum.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_steps.h"

namespace tilewise::cuda::wgmma {

// Adds a warpgroup's part of a tile; called by one thread. When it returns, the shared memory may
// be overwritten.
TILEWISE_DEVICE void reduce_add(float* to, ptx::SharedAddress from, int bytes) {
  ptx::cp_reduce_async_bulk_add_f32(to, from, bytes, ptx::CachePolicy::evict_last);
  ptx::cp_async_bulk_commit_group();
  ptx::cp_async_bulk_wait_group_read<0>();
}

// Semaphore order of deterministic sums: key tiles add to a query tile one after the other. Called
// by one thread; does nothing without semaphores.
//
// The semaphore is released when the additions have arrived in memory. The shared memory is free
// before that, so the consumers do not wait for it.
struct DqSemaphore {
  int32_t* semaphores;      // [query tiles]; null: sums in any order
  int32_t* held = nullptr;  // not yet released

  // Waits until `before` key tiles have added to the query tile. Each key tile increments the
  // semaphore twice, once per warpgroup.
  TILEWISE_DEVICE void acquire(int32_t tile, int32_t before) {
    if (semaphores == nullptr) return;
    release();
    held = semaphores + tile;
    while (ptx::ld_acquire(held) < 2 * before) {
    }
  }
  TILEWISE_DEVICE void release() {
    if (held == nullptr) return;
    ptx::cp_async_bulk_wait_group<0>();
    ptx::fence_proxy_async_all();
    ptx::red_release_add_s32(held, 1);
    held = nullptr;
  }
};

template <class C>
TILEWISE_DEVICE void reduction_role(const TmaBackwardParams& p, ptx::SharedAddress shared,
                                    int warpgroup) {
  using Plan = BackwardPlan<C>;
  constexpr int kBytesPerWarpgroup = 4 * Plan::kDqSliceBytes;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const int begin = warpgroup * kBytesPerWarpgroup;
  const int bytes = min(kBytesPerWarpgroup, Plan::kDqSlices * Plan::kDqSliceBytes - begin);
  const ptx::SharedAddress from = shared + static_cast<uint32_t>(Plan::kDq + begin);
  float* const to = p.dq_sum + begin / 4;
  const bool elected = ptx::lane_index() == 0;
  DqSemaphore semaphore{p.dq_semaphores};
  RowSteps<C> row_steps(shared);
  ptx::griddepcontrol_wait();  // for the zeros in dq_sum
#pragma unroll 1
  for (int32_t tile_number = 0;; ++tile_number) {
    const int stage = tile_number % Plan::kDescriptorStages;
    ptx::mbarrier_wait_parity(barriers.descriptor_full(stage),
                              tile_number / Plan::kDescriptorStages & 1);
    const TileDescriptor& work_tile = tile_descriptor<C>(stage);
    const int32_t steps = work_tile.steps;
    if (steps < 0) break;
    RowWalk walk(work_tile);
    const SemaphoreOrder<C> order(p, work_tile);
    wait_for_kv(barriers, tile_number & 1);
    ptx::sync_warp();
    if (elected) ptx::mbarrier_arrive(barriers.kv_empty());
#pragma unroll 1
    for (int32_t step = 0; row_steps.more(step, steps); ++step) {
      row_steps.begin(walk);
      ptx::bar_arrive(kDqEmpty + warpgroup, kDqThreads);
      if (elected) semaphore.acquire(walk.index, order.at(walk.row));
      ptx::sync_warp();
      ptx::bar_sync(kDqFull + warpgroup, kDqThreads);
      if (elected) reduce_add(to + int64_t{walk.index} * Plan::kDqTile, from, bytes);
      ptx::sync_warp();
      row_steps.end(walk);
    }
  }
  if (!elected) return;
  semaphore.release();
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace tilewise::cuda::wgmma
