// The producer role of the backward: one warp loads K and V once per work tile, and Q, dO and the
// row statistics once per step.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_steps.h"

namespace tilewise::cuda::wgmma {

// Loads a tile panel by panel; called by one thread. `full` already expects the bytes.
template <class Tile>
TILEWISE_DEVICE void load_panels(ptx::SharedAddress to, const TensorMap& map, int row, int head,
                                 int batch_index, ptx::SharedAddress full, int first_column = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::cp_async_bulk_tensor_load(to + static_cast<uint32_t>(panel * Tile::kPanelBytes), map,
                                   first_column + panel * tile::kPanelColumns, row, head,
                                   batch_index, full, ptx::CachePolicy::evict_normal);
  }
}

// Zeroes the rows from `first` on. `threads` threads call it; the index of this one is `thread`.
template <class Tile>
TILEWISE_DEVICE void zero_rows(ptx::SharedAddress tile, int first, int thread, int threads) {
  constexpr int kRowChunks = tile::kSwizzledRowBytes / 16;
  const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
#pragma unroll 1
    for (int i = first * kRowChunks + thread; i < Tile::kRows * kRowChunks; i += threads)
      ptx::st_shared_v4_b32(tile + static_cast<uint32_t>(panel * Tile::kPanelBytes + i * 16),
                            zeros);
  }
}

// The loads of Q or dO with their row statistic. All lanes call; lane 0 issues the copies.
template <class C, class Tile>
struct RowLoads {
  using Plan = BackwardPlan<C>;

  const TensorMap& map;
  const float* statistic;
  int32_t first_row;
  int32_t batch_index;

  TILEWISE_DEVICE void load(ptx::SharedAddress to, ptx::SharedAddress statistic_to,
                            const RowWalk& walk, ptx::SharedAddress full) const {
    if (ptx::lane_index() != 0) return;
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes + Plan::kStatisticBytes);
    load_panels<Tile>(to, map, first_row + walk.row, walk.head, batch_index, full);
    load_statistic(statistic_to, walk, full);
  }

  // The rows after the first `valid` ones belong to another sequence. They are zeroed, because the
  // product of 0 and NaN is NaN.
  TILEWISE_DEVICE void load_tail(ptx::SharedAddress to, ptx::SharedAddress statistic_to,
                                 const RowWalk& walk, ptx::SharedAddress full, int valid,
                                 ptx::SharedAddress tail_full, int tail_parity) const {
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(tail_full, Tile::kBytes);
      load_panels<Tile>(to, map, first_row + walk.row, walk.head, batch_index, tail_full);
    }
    ptx::mbarrier_wait_parity(tail_full, tail_parity);
    zero_rows<Tile>(to, valid, ptx::lane_index(), ptx::kWarpSize);
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (ptx::lane_index() != 0) return;
    ptx::mbarrier_arrive_expect_tx(full, Plan::kStatisticBytes);
    load_statistic(statistic_to, walk, full);
  }

 private:
  TILEWISE_DEVICE void load_statistic(ptx::SharedAddress to, const RowWalk& walk,
                                      ptx::SharedAddress full) const {
    ptx::cp_async_bulk_load(to, statistic + int64_t{walk.index} * Plan::kQueries,
                            Plan::kStatisticBytes, full);
  }
};

// Loads K and V of the CTA; called by one thread.
template <class C>
TILEWISE_DEVICE void load_kv(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                             ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const int row = work_tile.first_key;
  const int batch_index = work_tile.key_batch_index;
  ptx::mbarrier_arrive_expect_tx(barriers.k_full(), Plan::KTile::kBytes);
  load_panels<typename Plan::KTile>(shared + Plan::kK, p.k, row, work_tile.head, batch_index,
                                    barriers.k_full());
  if constexpr (Plan::kCluster == 1) {
    ptx::mbarrier_arrive_expect_tx(barriers.v_full(), Plan::VTile::kBytes);
  } else {
    using PeerKTile = typename Plan::PeerKTile;
    ptx::mbarrier_arrive_expect_tx(barriers.v_full(), Plan::VTile::kBytes + PeerKTile::kBytes);
    const int rank = static_cast<int>(ptx::block_index() % Plan::kCluster);
    load_panels<PeerKTile>(shared + Plan::kPeerK, p.k,
                           row + (rank == 0 ? Plan::kKeys : -Plan::kKeys), work_tile.head,
                           batch_index, barriers.v_full(), rank * (C::kHeadDim / 2));
  }
  load_panels<typename Plan::VTile>(shared + Plan::kV, p.v, row, work_tile.head, batch_index,
                                    barriers.v_full());
}

// Replaces K and V of the previous work tile. If nothing has to be loaded, because there are no
// steps or the consumers copy pages row by row, the barriers complete their phases all the same.
// `steps` is 0 if the walk has ended without a step.
template <class C>
TILEWISE_DEVICE void replace_kv(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                                ptx::SharedAddress shared, const RowSteps<C>& row_steps,
                                int32_t steps, int parity) {
  const BackwardBarriers barriers{shared + BackwardPlan<C>::kBarriers};
  ptx::mbarrier_wait_parity(barriers.kv_empty(), parity);
  if (ptx::lane_index() != 0) return;
  if (row_steps.count(steps, work_tile) > 0 && work_tile.paged == 0) {
    load_kv<C>(p, work_tile, shared);
  } else {
    ptx::mbarrier_arrive(barriers.k_full());
    ptx::mbarrier_arrive(barriers.v_full());
  }
}

// Loads Q, dO and their statistics for all steps of a work tile. K and V are loaded after the Q and
// dO of the first step, because the previous K and V are read until the end of their work tile.
// `first_step` counts the steps of the CTA's work tiles before this one. Returns their number.
template <class C>
TILEWISE_DEVICE int32_t load_work_tile(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                                       ptx::SharedAddress shared, RowSteps<C>& row_steps,
                                       int32_t first_step, int32_t kv_parity) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const RowLoads<C, typename Plan::QTile> q{p.q, p.row_lse, work_tile.first_row,
                                            work_tile.row_batch_index};
  const RowLoads<C, typename Plan::DoutTile> dout{p.dout, p.row_delta, work_tile.first_row,
                                                  work_tile.row_batch_index};
  const int32_t rows = work_tile.valid_rows;
  const auto at = [&](int first, int stage, int bytes) {
    return shared + static_cast<uint32_t>(first + stage * bytes);
  };
  RowWalk walk(work_tile);
  int32_t step = 0;
#pragma unroll 1
  for (; row_steps.more(step, work_tile.steps); ++step) {
    row_steps.begin(walk);
    const int32_t global_step = first_step + step;
    const int stage = global_step & 1;
    const int parity = (global_step >> 1 & 1) ^ 1;
    const int dout_stage = Plan::kDoutStages == 2 ? stage : 0;
    const int dout_parity = Plan::kDoutStages == 2 ? parity : stage ^ 1;
    const ptx::SharedAddress to_q = at(Plan::kQ, stage, Plan::QTile::kBytes);
    const ptx::SharedAddress to_lse = at(Plan::kLse, stage, Plan::kStatisticBytes);
    const ptx::SharedAddress to_dout = at(Plan::kDout, dout_stage, Plan::DoutTile::kBytes);
    const ptx::SharedAddress to_delta = at(Plan::kDelta, dout_stage, Plan::kStatisticBytes);
    const int32_t valid = rows - walk.row;
    ptx::mbarrier_wait_parity(barriers.q_empty(stage), parity);
    if (valid >= Plan::kQueries) {
      q.load(to_q, to_lse, walk, barriers.q_full(stage));
      ptx::mbarrier_wait_parity(barriers.dout_empty(dout_stage), dout_parity);
      dout.load(to_dout, to_delta, walk, barriers.dout_full(dout_stage));
    } else {
      q.load_tail(to_q, to_lse, walk, barriers.q_full(stage), valid, barriers.tail_full(), 0);
      ptx::mbarrier_wait_parity(barriers.dout_empty(dout_stage), dout_parity);
      dout.load_tail(to_dout, to_delta, walk, barriers.dout_full(dout_stage), valid,
                     barriers.tail_full(), 1);
    }
    if (step == 0) replace_kv<C>(p, work_tile, shared, row_steps, 1, kv_parity);
    row_steps.end(walk);
  }
  if (row_steps.count(step, work_tile) == 0)
    replace_kv<C>(p, work_tile, shared, row_steps, 0, kv_parity);
  return step;
}

// Loads the next descriptor into a stage, or writes the end mark there; called by one thread.
template <class C>
TILEWISE_DEVICE void fetch_descriptor(const BackwardParams& p, ptx::SharedAddress shared, int stage,
                                      int32_t index) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const ptx::SharedAddress to =
      shared + static_cast<uint32_t>(Plan::kDescriptors + stage * int{sizeof(TileDescriptor)});
  if (index < p.num_tiles * Plan::kCluster) {
    ptx::mbarrier_arrive_expect_tx(barriers.descriptor_full(stage), sizeof(TileDescriptor));
    ptx::cp_async_bulk_load(to, p.descriptors + index, sizeof(TileDescriptor),
                            barriers.descriptor_full(stage));
  } else {
    ptx::st_shared_b32(to + offsetof(TileDescriptor, steps), static_cast<uint32_t>(-1));
    ptx::mbarrier_arrive(barriers.descriptor_full(stage));
  }
}

// The index of the next work tile of the CTA.
TILEWISE_DEVICE int32_t next_index(const BackwardParams& p) {
  if (p.tile_counter == nullptr) return p.num_tiles;
  return static_cast<int32_t>(ptx::grid_blocks()) + ptx::atom_add(p.tile_counter, 1);
}

// Fetches the descriptor of the work tile after this one.
template <class C>
TILEWISE_DEVICE void fetch_next_descriptor(const BackwardParams& p, ptx::SharedAddress shared,
                                           int32_t tile_number) {
  if (ptx::lane_index() != 0) return;
  constexpr int kStages = BackwardPlan<C>::kDescriptorStages;
  fetch_descriptor<C>(p, shared, (tile_number + 1) % kStages, next_index(p));
}

template <class C>
TILEWISE_DEVICE void producer_role(const TmaBackwardParams& p, ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  ptx::griddepcontrol_wait();  // for the descriptors and the row statistics
  if (ptx::lane_index() == 0)
    fetch_descriptor<C>(p, shared, 0, static_cast<int32_t>(ptx::block_index()));
  RowSteps<C> row_steps(shared);
  int32_t steps = 0;
#pragma unroll 1
  for (int32_t tile_number = 0;; ++tile_number) {
    ptx::mbarrier_wait_parity(barriers.descriptor_full(tile_number % Plan::kDescriptorStages),
                              tile_number / Plan::kDescriptorStages & 1);
    const TileDescriptor& work_tile = tile_descriptor<C>(tile_number % Plan::kDescriptorStages);
    if (work_tile.steps < 0) return;
    // The mask warp works on the next work tile while this one is loaded and computed.
    if constexpr (C::kMasked) fetch_next_descriptor<C>(p, shared, tile_number);
    const int32_t walked =
        load_work_tile<C>(p, work_tile, shared, row_steps, steps, (tile_number & 1) ^ 1);
    if constexpr (kByColumns<C>) return;  // it is not persistent
    if constexpr (!C::kMasked) fetch_next_descriptor<C>(p, shared, tile_number);
    steps += row_steps.count(walked, work_tile);
  }
}

}  // namespace tilewise::cuda::wgmma
