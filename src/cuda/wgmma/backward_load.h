// The warp that loads: K and V of the block once, then Q, dO and the row statistics, tile by tile.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/backward_work.h"

namespace tilewise::cuda::wgmma {

// Panel by panel, by one thread. `landed` has been told of the bytes.
template <class Tile>
TILEWISE_DEVICE void load_panels(ptx::SharedAddress to, const TensorMap& map, int row, int head,
                                 int slot, ptx::SharedAddress landed, int first_column = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::cp_async_bulk_tensor_load(to + static_cast<uint32_t>(panel * Tile::kPanelBytes), map,
                                   first_column + panel * tile::kPanelColumns, row, head, slot,
                                   landed, ptx::CachePolicy::evict_normal);
  }
}

// Rows from `first` on become 0, by `threads` threads of which this one is `thread`.
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

// The loads of Q or dO with their statistic. All lanes call; lane 0 starts the copies.
template <class C, class Tile>
struct RowLoads {
  using Plan = BackwardPlan<C>;

  const TensorMap& map;
  const float* statistic;
  int32_t first_row;
  int32_t slot;

  TILEWISE_DEVICE void load(ptx::SharedAddress to, ptx::SharedAddress statistic_to,
                            const RowWalk& walk, ptx::SharedAddress landed) const {
    if (ptx::lane_index() != 0) return;
    ptx::mbarrier_arrive_expect_tx(landed, Tile::kBytes + Plan::kStatisticBytes);
    load_panels<Tile>(to, map, first_row + walk.row, walk.head, slot, landed);
    load_statistic(statistic_to, walk, landed);
  }

  // The rows past the first `keep` are not of this sequence. 0 * NaN is NaN: they become 0.
  TILEWISE_DEVICE void load_tail(ptx::SharedAddress to, ptx::SharedAddress statistic_to,
                                 const RowWalk& walk, ptx::SharedAddress landed, int keep,
                                 ptx::SharedAddress tail_landed, int tail_parity) const {
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(tail_landed, Tile::kBytes);
      load_panels<Tile>(to, map, first_row + walk.row, walk.head, slot, tail_landed);
    }
    ptx::mbarrier_wait_parity(tail_landed, tail_parity);
    zero_rows<Tile>(to, keep, ptx::lane_index(), ptx::kWarpSize);
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (ptx::lane_index() != 0) return;
    ptx::mbarrier_arrive_expect_tx(landed, Plan::kStatisticBytes);
    load_statistic(statistic_to, walk, landed);
  }

 private:
  TILEWISE_DEVICE void load_statistic(ptx::SharedAddress to, const RowWalk& walk,
                                      ptx::SharedAddress landed) const {
    ptx::cp_async_bulk_load(to, statistic + int64_t{walk.index} * Plan::kQueries,
                            Plan::kStatisticBytes, landed);
  }
};

// K and V of the block, before anything else; by one thread, which has made the barriers.
template <class C>
TILEWISE_DEVICE void load_keys(const TmaBackwardParams& p, const KeyWork<C>& work,
                               ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const auto row = static_cast<int32_t>(work.sequence.kv.first + work.keys.begin);
  const auto slot = static_cast<int32_t>(work.sequence.kv.slot);
  ptx::mbarrier_arrive_expect_tx(barriers.k_landed(), Plan::KTile::kBytes);
  load_panels<typename Plan::KTile>(shared + Plan::kK, p.k, row, work.head, slot,
                                    barriers.k_landed());
  if constexpr (Plan::kCluster == 1) {
    ptx::mbarrier_arrive_expect_tx(barriers.v_landed(), Plan::VTile::kBytes);
  } else {
    using PeerKTile = typename Plan::PeerKTile;
    ptx::mbarrier_arrive_expect_tx(barriers.v_landed(), Plan::VTile::kBytes + PeerKTile::kBytes);
    const int peer_row = row + (work.rank == 0 ? Plan::kKeys : -Plan::kKeys);
    load_panels<PeerKTile>(shared + Plan::kPeerK, p.k, peer_row, work.head, slot,
                           barriers.v_landed(), work.rank * (C::kHeadDim / 2));
  }
  load_panels<typename Plan::VTile>(shared + Plan::kV, p.v, row, work.head, slot,
                                    barriers.v_landed());
}

template <class C>
TILEWISE_DEVICE void load_role(const TmaBackwardParams& p, const KeyWork<C>& work,
                               ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const auto first_row = static_cast<int32_t>(work.sequence.first_row);
  const auto slot = static_cast<int32_t>(work.sequence.slot);
  const RowLoads<C, typename Plan::QTile> q{p.q, p.row_lse, first_row, slot};
  const RowLoads<C, typename Plan::DoutTile> dout{p.dout, p.row_delta, first_row, slot};
  const int32_t rows = work.rows_to_keep(p.problem);
  RowWalk walk = work.walk(p.problem);

  const auto at = [&](int first, int stage, int bytes) {
    return shared + static_cast<uint32_t>(first + stage * bytes);
  };

  ptx::griddepcontrol_wait();  // for the row statistics
#pragma unroll 1
  for (int32_t step = 0; step < work.steps; ++step) {
    const int stage = step & 1;
    const int parity = (step >> 1 & 1) ^ 1;
    const int dout_stage = Plan::kDoutStages == 2 ? stage : 0;
    const int dout_parity = Plan::kDoutStages == 2 ? parity : stage ^ 1;
    const ptx::SharedAddress to_q = at(Plan::kQ, stage, Plan::QTile::kBytes);
    const ptx::SharedAddress to_lse = at(Plan::kLse, stage, Plan::kStatisticBytes);
    const ptx::SharedAddress to_dout = at(Plan::kDout, dout_stage, Plan::DoutTile::kBytes);
    const ptx::SharedAddress to_delta = at(Plan::kDelta, dout_stage, Plan::kStatisticBytes);
    const int32_t keep = rows - walk.row;
    ptx::mbarrier_wait_parity(barriers.q_read(stage), parity);
    if (keep >= Plan::kQueries) {
      q.load(to_q, to_lse, walk, barriers.q_landed(stage));
      ptx::mbarrier_wait_parity(barriers.dout_read(dout_stage), dout_parity);
      dout.load(to_dout, to_delta, walk, barriers.dout_landed(dout_stage));
    } else {
      q.load_tail(to_q, to_lse, walk, barriers.q_landed(stage), keep, barriers.tail_landed(), 0);
      ptx::mbarrier_wait_parity(barriers.dout_read(dout_stage), dout_parity);
      dout.load_tail(to_dout, to_delta, walk, barriers.dout_landed(dout_stage), keep,
                     barriers.tail_landed(), 1);
    }
    walk.advance(Plan::kQueries);
  }
}

}  // namespace tilewise::cuda::wgmma
