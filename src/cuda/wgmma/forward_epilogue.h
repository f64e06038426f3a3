// The end of a forward work tile: its sums become rows of out and lse, or a partial result.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/forward_softmax.h"
#include "cuda/wgmma/forward_store.h"
#include "cuda/wgmma/nan_recompute.h"

namespace tilewise::cuda::wgmma {

// The index of a thread among the consumers. Computed at each use, because registers are needed for
// accumulators.
TILEWISE_DEVICE int consumer_thread() {
  return static_cast<int>(ptx::opaque(static_cast<uint32_t>(ptx::thread_index()))) -
         ptx::kWarpgroupSize;
}

// State of a finished tile that does not depend on its last PV product.
template <class C>
struct EpilogueState {
  float l[1][2];  // summed over all lanes of a row
  RowResults<1> rows;
  OutRows<C> out;
};

// The part of the epilogue that runs while the last PV product of the tile is in flight. `weight`
// and unit() as in finish_rows.
template <class C, class RowMath, class Unit>
TILEWISE_DEVICE EpilogueState<C> begin_epilogue(const TmaForwardParams& p,
                                                const ForwardWorkTile<C>& work_tile,
                                                const LanePosition& at, const RowMath& softmax,
                                                float weight, const Unit& unit) {
  EpilogueState<C> epilogue;
  epilogue.l[0][0] = softmax.l[0][0];
  epilogue.l[0][1] = softmax.l[0][1];
  epilogue.rows = finish_rows<typename C::Out, !RowMath::kIsBounded>(p, work_tile, at, softmax.m,
                                                                     epilogue.l, weight, unit);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (RowMath::kIsBounded
            ? epilogue.l[0][h] > kOverflow
            : needs_recompute<C::kForward.keys, RowMath::kClampsExponents>(
                  p.problem, work_tile, at.row(0, h), softmax.m[0][h], epilogue.l[0][h])) {
      // Marks a row that has to be recomputed: by this CTA, or by the combine kernel if the results
      // are partial.
      epilogue.l[0][h] = -kMinusInfinity;
      epilogue.rows.factor[0][h] = epilogue.rows.lse[0][h] = common::recompute_marker();
    }
  }
  if (!work_tile.sequence.fits) [[unlikely]]
    epilogue.rows.set_to_nan();
  epilogue.out = OutRows<C>::of(p.problem, work_tile, at.row0);
  if (work_tile.splits == 1) store_row_sums<C>(p.problem, work_tile, at, epilogue.rows);
  return epilogue;
}

// Stores the sums, and adds the tile to the warp's recompute list if some of its rows have to be
// recomputed.
template <class C, class RowMath>
TILEWISE_DEVICE void store_tile(const TmaForwardParams& p, const ForwardWorkTile<C>& work_tile,
                                const LanePosition& at, const Outputs<C>& o,
                                const EpilogueState<C>& epilogue, int32_t& recompute_head) {
  const bool grown = ptx::fmax(epilogue.l[0][0], epilogue.l[0][1]) > RowMath::kRescaleThreshold;
  const bool recomputes = C::kGeneral || work_tile.splits == 1;
  if (recomputes && (p.nan_may_leak || ptx::any(grown)) &&
      ptx::any(!outputs_are_finite(work_tile, at, o, epilogue.l)) && work_tile.sequence.fits)
      [[unlikely]]
    NanRecompute<C>::add_to_list(p, consumer_thread() / ptx::kWarpSize, work_tile.index,
                                 recompute_head);
  if (work_tile.splits > 1) [[unlikely]] {
    if constexpr (C::kGeneral)
      store_partial(p, work_tile, at, o, epilogue.rows);
    else
      store_partial_tile<C>(p, work_tile, at, o, epilogue.rows);
  } else if (C::kGeneral && widens_out<typename C::Out::Storage>(p.problem)) {
    store_wide_outputs<true>(p.problem, work_tile, at, o, epilogue.rows);
  } else if (C::kFloat8 && dtypes_of(p.problem).out == TILEWISE_FLOAT16) {
    store_outputs<C, F16>(p.problem, work_tile, at, o, epilogue.rows, epilogue.out);
  } else {
    store_outputs<C>(p.problem, work_tile, at, o, epilogue.rows, epilogue.out);
  }
}

}  // namespace tilewise::cuda::wgmma
