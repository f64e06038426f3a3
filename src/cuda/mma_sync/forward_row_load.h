// Loads keys and values row by row, for pages that are smaller than a TMA box. All lanes copy with
// cp.async, and arrive at the full barrier when their copies have completed.
#pragma once

#include "cuda/mma_sync/forward_pages.h"
#include "cuda/mma_sync/forward_stage.h"
#include "cuda/tile/panels.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class RowLoader {
 public:
  static constexpr int kArrivals = ptx::kWarpSize;  // at the full barrier of a stage
  static constexpr int kPrefetchSectors = 4;        // per lane: the entries of at least 1024 keys
  static constexpr int kPrefetchAt = 0;
  static constexpr int kBytes = kPrefetchBytes<kPrefetchSectors>;  // of shared memory

  TILEWISE_DEVICE static void prepare(const ForwardParams&) {}

  TILEWISE_DEVICE RowLoader(const ForwardParams& p, const QueryTile& q_tile, int32_t last,
                            ptx::SharedAddress)
      : q_tile_(q_tile),
        rows_(p, q_tile, last),
        k_(p, p.problem.k, p.problem.head_dim, q_tile),
        v_(p, p.problem.v, p.problem.head_dim_v, q_tile) {}

  TILEWISE_DEVICE void load(bool keys, int32_t tile, const Stage& stage) {
    if (keys) rows_.advance(q_tile_, tile, k_, v_);
#pragma unroll
    for (int part = 0; part < TileCopy::kParts; ++part) (keys ? k_ : v_).copy(stage.at, true, part);
    ptx::cp_async_mbarrier_arrive(stage.barrier);
  }
  // Loads the tile that is read first; rows past the last key become 0.
  TILEWISE_DEVICE void load_first(bool keys, int32_t tile, const Stage& stage) {
    if (keys) rows_.advance(q_tile_, tile, k_, v_);
    (keys ? k_ : v_).copy_whole(stage.at, q_tile_.tiles.keys - tile * C::kForward.keys);
    ptx::cp_async_mbarrier_arrive(stage.barrier);
  }
  TILEWISE_DEVICE int32_t first_tile_rows(int32_t) const { return C::kForward.keys; }
  TILEWISE_DEVICE bool pages_fit(const QueryTile& q_tile) const { return rows_.fit(q_tile); }

 private:
  using Lanes = tile::PanelLanes<StageTile<C>, C::kHeadDim * C::Element::kBytes>;
  using TileCopy = PagedTileCopy<C, Lanes>;

  const QueryTile& q_tile_;
  PageRows<C, Lanes> rows_;
  TileCopy k_;
  TileCopy v_;
};

}  // namespace tilewise::cuda::mma_sync
