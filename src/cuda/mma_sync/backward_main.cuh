// The backward of FlashAttention-2 (arXiv 2307.08691, algorithm 2) on tensor cores. A CTA owns a
// tile of keys of one key/value head, sums dK and dV in registers over the query heads of its group
// and over the tiles of query rows that see the keys, and adds dQ to sums in global memory.
//
// Scores are computed transposed (S^T = K Q^T, dP^T = V dO^T): what a warp has computed of P^T and
// dS^T is then the left operand of its products for dV and dK without leaving registers.
//
// Roles: no warp is specialised; each loads and computes. Warp w owns 32 keys and a share of the
// queries for S and dP, 32 keys and a share of the columns for dK and dV, and some rows and columns
// of dQ (backward_plan.h).
//
// What passes through shared memory: K and V, loaded once; Q, dO, row_lse and row_delta of a tile,
// copied with cp.async through 1, 2 or 3 stages; dS and, when several warps share a tile's queries,
// P of all warps. CTA barriers order all of it.
//
// Loop over row tiles i, in one query head after the other, with 3 stages and an early barrier:
//   S^T = K Q^T, mask    dP^T = V dO^T    P, dS to registers and shared memory
//   dV += P^T dO         own queries
//   wait tile i + 1, barrier: dS and P of all warps are complete
//   dK += dS^T Q         own queries; copy tile i + 2 to the stage of tile i - 1
//   dV, dK               queries of the other warps
//   dQ = dS K            added to dq_sum with red.add, or in semaphore order (deterministic)
// dS and P are double-buffered, so that this is the only barrier. With 2 stages a second barrier
// opens the step, and Q and dO of tile i + 1 are copied beside S and dP; with 1 stage tile i + 1 is
// copied at the end of the step. Without an early barrier the barrier follows the products of dK
// with the warp's own queries. Head dimensions above 256 have another order of dK, dV and copies
// (backward_column_warps.cuh).
#pragma once

#include "cuda/common/exponent_scale.h"
#include "cuda/mma_sync/backward_column_warps.cuh"
#include "cuda/mma_sync/backward_keys.cuh"
#include "cuda/mma_sync/backward_products.cuh"
#include "cuda/mma_sync/backward_rows.cuh"
#include "cuda/mma_sync/backward_scores.cuh"
#include "cuda/mma_sync/backward_semaphores.cuh"
#include "cuda/mma_sync/backward_step.cuh"

namespace tilewise::cuda::mma_sync {

// Adds dK and dV of a step. `refill` runs when the previous stage is no longer read.
template <class C, class Columns, class Offsets, class Refill>
TILEWISE_DEVICE void add_dk_dv(KeySums<C>& dk, KeySums<C>& dv, const OwnScores<C>& p_own,
                               const OwnScores<C>& ds_own, const Columns& columns,
                               const Offsets& scores, const StepTiles<C>& at, Refill&& refill) {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  // dV += P^T dO and dK += dS^T Q with the warp's own queries.
  constexpr int kHeld = Plan::kHeldSteps;
  tile::Fragment<Element> a[kHeld][2];
#pragma unroll
  for (int j = 0; j < Plan::kOwnSteps; j += kHeld) {
#pragma unroll
    for (int i = 0; i < 2 * kHeld; ++i) a[i / 2][i % 2] = p_own.at(j + i / 2, i % 2);
    add_steps<C>(dv, a, columns, at.d_out + at.warp_rows, j * Plan::kStep);
  }
  if constexpr (Plan::kTile.early_barrier) {
    if constexpr (Plan::kStages == 3) tile::wait<typename C::Arch, 0>();
    ptx::sync_block();
  }
#pragma unroll
  for (int j = 0; j < Plan::kOwnSteps; j += kHeld) {
#pragma unroll
    for (int i = 0; i < 2 * kHeld; ++i) {
      a[i / 2][i % 2] = Plan::kOwnDsInRegisters
                            ? ds_own.at(j + i / 2, i % 2)
                            : tile::load<Element>(at.ds + scores.rows(i % 2 * 16, j + i / 2));
    }
    add_steps<C>(dk, a, columns, at.q + at.warp_rows, j * Plan::kStep);
    if (j == 0) refill();
  }
  if constexpr (!Plan::kTile.early_barrier) ptx::sync_block();

  // The same with the queries of the other warps.
#pragma unroll
  for (int j = Plan::kOwnSteps; j < Plan::kQueries / Plan::kStep; j += kHeld) {
    const int query = at.warp_query / Plan::kStep * Plan::kStep ^ j * Plan::kStep;
    const uint32_t query_rows = static_cast<uint32_t>(query * Plan::kRowBytes);
#pragma unroll
    for (int i = 0; i < 2 * kHeld; ++i)
      a[i / 2][i % 2] = tile::load<Element>(at.p + scores.rows(i % 2 * 16, j + i / 2));
    add_steps<C>(dv, a, columns, at.d_out + query_rows, 0);
#pragma unroll
    for (int i = 0; i < 2 * kHeld; ++i)
      a[i / 2][i % 2] = tile::load<Element>(at.ds + scores.rows(i % 2 * 16, j + i / 2));
    add_steps<C>(dk, a, columns, at.q + query_rows, 0);
  }
}

// Adds pass `pass` of the dQ of a step to its sums; in semaphore order when the backward is
// deterministic.
template <class C>
TILEWISE_DEVICE void add_dq(const BackwardParams& p, const typename DqProduct<C>::Sums& dq,
                            int pass, const KeyTile<C>& key_tile, const TileRecord<C>& record,
                            int warp, int lane) {
  const int32_t index = record.index();
  float* to = p.dq_sum + int64_t{index} * BackwardPlan<C>::kDqTile;
  if (p.dq_semaphores != nullptr) {
    if (pass == 0) wait_semaphore(p.dq_semaphores + index, key_tile, record.row());
    DqProduct<C>::reduce(dq, to, pass, warp, lane);
    if (pass + 1 == BackwardPlan<C>::kDqPasses) release_semaphore(p.dq_semaphores + index);
  } else {
    DqProduct<C>::reduce(dq, to, pass, warp, lane);
  }
}

template <class C>
TILEWISE_KERNEL(BackwardPlan<C>::kThreads, C::kBackward.blocks_per_sm)
void backward(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = BackwardPlan<C>;
  using Element = typename C::Element;
  using Arch = typename C::Arch;
  constexpr int kStages = Plan::kStages;
  const Problem& problem = p.problem;
  if (p.key_flags.data != nullptr && ptx::thread_index() == 0)
    p.key_flags.data[ptx::block_index()] = 0;

  const TileOrder::WorkTile work_tile = p.order.at(ptx::block_index());
  if (work_tile.sequence < 0) return;
  Sequence sequence = sequence_of(problem, work_tile.sequence);
  if constexpr (!C::kGeneral) sequence.kv.pages = nullptr;
  const Band& band = sequence.band;
  const Range keys = Tiling{band.keys, Plan::kKeys}.at(work_tile.tile);
  if (keys.empty()) return;
  const int32_t group =
      static_cast<int32_t>(problem.heads_q) / static_cast<int32_t>(problem.heads_kv);
  const int64_t first_head = work_tile.head * int64_t{group};
  constexpr PaddedRows kPadded{Plan::kQueries};
  const Range row_tiles = Tiling{band.rows, Plan::kQueries}.touching(band.rows_of_any(keys));
  const int64_t head_tiles = kPadded.count(problem) / Plan::kQueries;
  const RowTile<C> first_tile{
      static_cast<int32_t>(row_tiles.begin * Plan::kQueries),
      static_cast<int32_t>(row_tiles.end * Plan::kQueries),
      static_cast<int32_t>(first_head * head_tiles + row_tiles.begin +
                           kPadded.first(problem, sequence.batch) / Plan::kQueries)};

  const int lane = ptx::lane_index();
  const int warp = ptx::warp_index();
  const int warp_key = warp / Plan::kTile.query_warps * 32;
  const int column_warp = column_warp_of<C>(warp);
  const int warp_query = warp % Plan::kTile.query_warps / Plan::kColumnWarps * Plan::kWarpQueries;
  const int warp_column = warp % Plan::kTile.query_warps * Plan::kColumns;
  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  const ptx::SharedAddress warp_k = shared + Plan::kK + warp_key * Plan::kRowBytes;
  const ptx::SharedAddress warp_v = shared + Plan::kV + warp_key * Plan::kRowBytes;

  if (ptx::thread_index() == 0) {
    KeyTile<C>::store(shared, work_tile, band, row_tiles, head_tiles,
                      p.order.longest_tile == LongestTile::last, *p.far_rows == p.launch_id);
  }
  copy_keys<C>(shared + Plan::kK, problem.k, sequence.kv, work_tile.head, keys, problem.head_dim);
  copy_keys<C>(shared + Plan::kV, problem.v, sequence.kv, work_tile.head, keys, problem.head_dim_v);
  if constexpr (C::kMasked) masked_rows<C>().find(p, sequence, first_head, group, row_tiles, keys);
  ptx::sync_block();
  RowPipeline<C> pipeline(p, sequence, first_head, first_tile, shared);
  int32_t steps = static_cast<int32_t>(row_tiles.size()) * group;  // remaining
  if constexpr (C::kMasked) steps = masked_rows<C>().count();
  pipeline.copy(p, 0, steps > 0);
  presplit_keys<C>(shared);
  if constexpr (kStages == 3) {
    pipeline.copy(p, 1, steps > 1);
    tile::wait<Arch, 1>();
    ptx::sync_block();
  }

  const KeyTile<C> key_tile(shared);
  const float scale_log2 = exponent_scale(score_of(problem).scale);
  [[maybe_unused]] GeneralScores<C> general(problem, sequence, first_head,
                                            keys.begin + warp_key + lane / 4);

  const RowProduct<C> row_product(lane, column_warp);
  const tile::TransposedB<Element, Plan::kRowBytes> column_offsets(lane, warp_column / 16);
  const tile::OperandOffsets<Plan::kScoreRowBytes> score_offsets(lane, warp_key,
                                                                 warp_query * Plan::kBytes / 16);
  const DqProduct<C> dq_product(lane, warp);
  KeySums<C> dk;
  KeySums<C> dv;
  dk.fill(0.0f);
  dv.fill(0.0f);

  int stage = 0;
#pragma unroll 1
  for (; steps != 0; --steps) {
    if constexpr (kStages < 3) {
      tile::wait<Arch, Plan::kInFlight>();
      ptx::sync_block();
    }
    const auto columns = column_offsets.opaque();
    const auto scores = Plan::kRecomputeScoreOffsets ? score_offsets.opaque() : score_offsets;
    const int score_tile = kStages == 3 ? steps & 1 : 0;
    const TileRecord<C> record(shared, stage);
    const StepTiles<C> at(shared, stage, score_tile, warp_query);

    OwnScores<C> p_own;
    OwnScores<C> ds_own;
    {
      ScoreSums<C> s;
      ScoreSums<C> dp;
      s.fill(0.0f);  // S^T = K Q^T
      row_product.add(s, warp_k, at.q + at.warp_rows, [&](int k) {
        if (kStages == 2 && k == 1 && steps > 1) pipeline.copy_q(p, stage ^ 1);
      });
      add_other_columns<C>(s, shared, warp);
      if constexpr (!C::kGeneral) {
        if (record.masked())
          hide_scores<C>(s, p, key_tile, record, warp_key, warp_query, lane, scale_log2);
      }
      wait_for_d_out<C>();
      start_dp<C>(dp, at.thread_delta, column_warp);  // dP^T - delta = V dO^T - delta
      row_product.add(dp, warp_v, at.d_out + at.warp_rows, [&](int k) {
        if (kStages == 2 && k == 1) {
          if (steps > 1) pipeline.copy_d_out(p, stage ^ 1);
          tile::commit<Arch>();
        }
      });
      add_other_columns<C>(dp, shared, warp);
      if constexpr (C::kGeneral) {
        const int32_t row = record.row() + warp_query;
        const KeyMask<C> mask(key_tile, warp_key + lane / 4, row);
        general.start_head(problem, sequence, first_head + record.head());
        general.apply(s, dp, mask, p, key_tile, row, record.index(), at.thread_lse, at.thread_delta,
                      shown_keys(record, first_head, row, keys.begin + warp_key));
      }
      // P, dS = P (dP - delta)
      store_scores<C>(p_own, ds_own, s, dp, scores, at, scale_log2, column_warp);
    }
    if constexpr (Plan::kColumnWarps > 1) {
      add_shared_dk_dv<C>(dk, dv, columns, scores, at,
                          [&](RowOperand which) { pipeline.copy(p, which, stage ^ 1, steps > 1); });
    } else {
      add_dk_dv<C>(dk, dv, p_own, ds_own, columns, scores, at, [&] {
        if constexpr (kStages == 3) pipeline.copy(p, stage == 0 ? 2 : stage - 1, steps > 2);
      });
    }
#pragma unroll
    for (int pass = 0; p.dq_sum != nullptr && pass < Plan::kDqPasses; ++pass) {
      typename DqProduct<C>::Sums dq;
      dq.fill(0.0f);  // dQ += dS K
      dq_product.add(dq, at.ds, shared + Plan::kK, pass);
      add_dq<C>(p, dq, pass, key_tile, record, warp, lane);
    }

    if constexpr (Plan::kStatisticsStages == 1) {
      ptx::sync_block();
      pipeline.copy(p, 0, steps > 1);
    } else if constexpr (Plan::kStatisticsStages == 2) {
      stage ^= 1;
    } else {
      stage = stage == 2 ? 0 : stage + 1;
    }
  }

  tile::wait<Arch, 0>();
  ptx::sync_block();
  write_dk_dv<C>(p, dk, dv, shared);
}

}  // namespace tilewise::cuda::mma_sync
