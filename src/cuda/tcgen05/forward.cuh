// The forward on datacenter Blackwell (sm_100, sm_103): the schedule of FlashAttention-4 (arXiv
// 2603.05451) on TMA and tcgen05. A CTA computes one work tile of 256 rows of a head as two tiles
// of 128.
//
//   warps 0-3, 4-7   softmax of tile 0, 1; a row per thread            forward_softmax.h
//   warps 8-11       correction: scale the sums, store the results     forward_correction.h
//   warp 12          products, issued by one thread                    forward_products.h
//   warp 13          loads of Q, K and V                               forward_load.h
//
//   what passes       from         to           mbarriers of forward_shared.h
//   Q                 loads        products     q_full
//   K, V              loads        products     kv_full; kv_empty
//   S                 products     softmax      scores_full
//   P                 softmax      products     weights_full
//   factor of O       softmax      correction   factors_full
//   O is scaled       correction   products     weights_full
//   m and l           softmax      correction   rows_full
//   O                 products     correction   out_full
//
// The timeline of a key tile and the next one ('), from the last to the first:
//
//   products    S0 S1 | O0 S0' O1 S1' | O0' ...
//   softmax 0      P0          P0'
//   softmax 1         P1            P1'
#pragma once

#include "cuda/common/trigger_dependents.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tcgen05/forward_correction.h"
#include "cuda/tcgen05/forward_load.h"
#include "cuda/tcgen05/forward_products.h"
#include "cuda/tcgen05/forward_softmax.h"

namespace tilewise::cuda::tcgen05 {

// The warps of the roles.
inline constexpr int kCorrectionWarp = 8;
inline constexpr int kProductWarp = 12;
inline constexpr int kLoadWarp = 13;

// Before the CTA's first barrier: the work tile, barriers and tensor memory.
template <class C>
TILEWISE_DEVICE void begin(const ForwardParams& p, const ForwardShared<C>& shared, int warp,
                           QueryTile& work_tile) {
  work_tile.tiles.find_full(work_tile.rows, C::kForward.keys);
  if (ptx::thread_index() == 0) {
    shared.work_tile() = work_tile;
    shared.init_barriers();
    if (!work_tile.sequence.fits) [[unlikely]]
      call_report_sequence<ForwardParams>(p, work_tile.sequence, {});
  }
  if (warp == kProductWarp) {
    ptx::tcgen05_alloc(shared.tensor_at(), ptx::kTensorColumns);
    ptx::tcgen05_relinquish_alloc_permit();
  }
}

template <class C>
TILEWISE_KERNEL(C::kForward.threads(), 1)
void forward(TILEWISE_PARAMETER TmaForwardParams p) {
  const ForwardShared<C> shared = ForwardShared<C>::of_this_cta();
  const int warp = ptx::uniform(ptx::warp_index());
  const int row = ptx::thread_index() % ForwardShared<C>::kRows;
  ptx::griddepcontrol_wait();
  if (ptx::thread_index() == 0) p.flags.data[ptx::block_index()] = 0;
  QueryTile work_tile = QueryTile::of(p, p.order.at(ptx::block_index()), C::kForward.keys);
  if (!work_tile.any()) return;
  begin(p, shared, warp, work_tile);
  ptx::sync_block();
  common::trigger_dependents(p, PdlTrigger::after_first_loads);
  const bool has_keys = shared.work_tile().tiles.first <= shared.work_tile().tiles.last;
  if (warp < kCorrectionWarp) {
    ptx::setmaxnreg_inc<C::kForward.softmax_registers>();
    if (has_keys) ForwardSoftmax<C>(p, shared, warp / 4, row).run();
  } else if (warp < kProductWarp) {
    ptx::setmaxnreg_dec<C::kForward.correction_registers>();
    ForwardCorrection<C>(p, shared, row).run();
  } else {
    ptx::setmaxnreg_dec<C::kForward.other_registers>();
    if (warp == kProductWarp && has_keys && ptx::elect_one()) ForwardProducts<C>(p, shared).run();
    if (warp == kLoadWarp && has_keys) ForwardLoad<C>(p, shared).run();
  }
  common::trigger_dependents(p, PdlTrigger::before_epilogue);
  ptx::tcgen05_fence_before();
  ptx::sync_block();
  ptx::tcgen05_fence_after();
  if (warp == kProductWarp)
    ptx::tcgen05_dealloc(ptx::ld_shared_b32(shared.tensor_at()), ptx::kTensorColumns);
}

}  // namespace tilewise::cuda::tcgen05
