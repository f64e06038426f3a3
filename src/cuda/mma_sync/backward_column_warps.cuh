// Column warps of the backward, for head dimensions above 256: two neighbouring warps have the same
// 32 keys and the same queries of a tile, and divide the columns that S and dP are sums over.
//
// dK and dV of 32 keys take half of the registers of eight warps, so that a CTA owns no more keys,
// and all eight warps share its products for S^T and dP^T. Eight warps with 8 queries each would
// load all of K and V eight times per tile: at head dimension 512, with 64 queries, 320 KB for S.
// Pairs with 16 queries load 192 KB and exchange 32 KB of parts. Both warps of a pair add the part
// of the other one: a + b equals b + a to the last bit, so both have the same scores, and each
// computes P and dS for itself. One stores those of keys 0 to 15 for all warps, the other the rest.
//
// Q and dO have one stage, since a second one does not fit, and each is loaded while the products
// run that do not read it. In this order, whose bars are barriers of the CTA, each load has the
// time of two of the five products:
//   Q has arrived | S^T = K Q^T    dO has arrived | dP^T = V dO^T    P, dS to shared memory |
//   dK += dS^T Q | load Q of the next tile    dV += P^T dO | load dO of the next tile    dQ = dS K
#pragma once

#include "cuda/mma_sync/backward_keys.cuh"
#include "cuda/mma_sync/backward_products.cuh"
#include "cuda/mma_sync/backward_rows.cuh"
#include "cuda/mma_sync/backward_step.cuh"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/sum_parts.h"

namespace tilewise::cuda::mma_sync {

// The index of a warp among those that have its keys and queries.
template <class C>
TILEWISE_DEVICE int column_warp_of(int warp) {
  return BackwardPlan<C>::kColumnWarps > 1 ? warp % BackwardPlan<C>::kColumnWarps : 0;
}

// Adds the part of the other column warp to S^T or dP^T. A barrier of the CTA must follow before
// the next parts are stored.
template <class C>
TILEWISE_DEVICE void add_other_columns(ScoreSums<C>& s, ptx::SharedAddress shared, int warp) {
  using Plan = BackwardPlan<C>;
  if constexpr (Plan::kColumnWarps > 1) {
    static_assert(Plan::kColumnWarps == 2 && Plan::kPartBytes == tile::kPartBytes<ScoreSums<C>>);
    constexpr int kFirstBarrier = 1;
    const ptx::SharedAddress parts = shared + Plan::kParts;
    tile::store_part(s, tile::lane_part<ScoreSums<C>>(parts, warp));
    ptx::bar_sync(kFirstBarrier + ptx::uniform(warp) / 2, 2 * ptx::kWarpSize);
    tile::add_part(s, tile::lane_part<ScoreSums<C>>(parts, warp ^ 1));
  }
}

// Column warps wait for dO when they have S.
template <class C>
TILEWISE_DEVICE void wait_for_d_out() {
  if constexpr (BackwardPlan<C>::kColumnWarps > 1) {
    tile::wait<typename C::Arch, 0>();
    ptx::sync_block();
  }
}

// d += a b over all queries of the step: a is P^T or dS^T of the warp's keys, b is dO or Q. Warps
// start at their own queries, so that not all of them read the same rows.
template <class C, class Columns, class Offsets>
TILEWISE_DEVICE void add_all_queries(KeySums<C>& d, ptx::SharedAddress a, ptx::SharedAddress b,
                                     int warp_query, const Columns& columns,
                                     const Offsets& scores) {
  using Plan = BackwardPlan<C>;
  static_assert(Plan::kHeldSteps == 1);
#pragma unroll
  for (int j = 0; j < Plan::kQueries / Plan::kStep; ++j) {
    const int query = warp_query / Plan::kStep * Plan::kStep ^ j * Plan::kStep;
    tile::Fragment<typename C::Element> keys[1][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      keys[0][m] = tile::load<typename C::Element>(a + scores.rows(m * 16, j));
    add_steps<C>(d, keys, columns, b + static_cast<uint32_t>(query * Plan::kRowBytes), 0);
  }
}

// Adds dK and dV of a step from shared memory. `refill` runs when an operand is no longer read.
template <class C, class Columns, class Offsets, class Refill>
TILEWISE_DEVICE void add_shared_dk_dv(KeySums<C>& dk, KeySums<C>& dv, const Columns& columns,
                                      const Offsets& scores, const StepTiles<C>& at,
                                      Refill&& refill) {
  ptx::sync_block();  // P and dS of all warps are complete
  add_all_queries<C>(dk, at.ds, at.q, at.warp_query, columns, scores);
  ptx::sync_block();
  refill(RowOperand::q);
  add_all_queries<C>(dv, at.p, at.d_out, at.warp_query, columns, scores);
  ptx::sync_block();
  refill(RowOperand::d_out);
}

}  // namespace tilewise::cuda::mma_sync
