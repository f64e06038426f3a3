// The pipeline of a latent cache (MLA, arXiv 2405.04434), whose values are the first columns of its
// keys: a stage holds one tile, and both products read it. So a CTA copies a row of 576 columns
// once, 1152 bytes, where K and V of their own would take 2176.
//
// Copies run kStages - 1 tiles ahead of the products. All threads of the CTA copy with cp.async
// while the scores of a tile are computed, and meet at one barrier per tile, which says that the
// tile has arrived and that no warp reads the values of the tile before any more.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_kv_pipeline.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class LatentPipeline {
 public:
  static_assert(C::kLatent && C::kForward.stages >= 2);
  // Eight lanes copy 128 bytes of a row, in the paged form as well: 1152 is 9 * 128.
  using Lanes = typename KvPipeline<C>::Lanes;
  using TileCopy = typename KvPipeline<C>::TileCopy;
  using Rows = typename KvPipeline<C>::Rows;
  using KeyLanes = typename KvPipeline<C>::KeyLanes;
  using ValueLanes = typename KvPipeline<C>::ValueLanes;
  using Arch = typename C::Arch;
  static constexpr int kStages = C::kForward.stages;
  static constexpr int kStageBytes = mma_sync::kStageBytes<C>;
  static constexpr int kLastStageAt = (kStages - 1) * kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kParts = TileCopy::kParts;

  TILEWISE_DEVICE static void prepare(const ForwardParams&, ptx::SharedAddress) {}
  // Nothing to do: the queries are loaded while pages are looked up.
  TILEWISE_DEVICE static void prefetch(const Problem&, int32_t, ptx::SharedAddress) {}

  TILEWISE_DEVICE LatentPipeline(const ForwardParams& p, const QueryTile& q_tile, int32_t last,
                                 ptx::SharedAddress base)
      : q_tile_(q_tile),
        rows_(p, q_tile, last),
        tiles_(p, p.problem.k, p.problem.head_dim, q_tile),
        base_(base),
        read_(base),
        last_(last) {}

  // Loads the queries and the first kStages - 1 tiles. The queries arrive with the first tile.
  template <class Queries>
  TILEWISE_DEVICE void start(Queries&& load_queries) {
    load_queries();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      const int32_t tile = last_ - i;
      const ptx::SharedAddress stage = base_ + i * kStageBytes;
      if constexpr (C::kPaged) {
        rows_.advance(q_tile_, tile, tiles_);
        const bool wanted = rows_.has_tile(tile);
        tiles_.copy_whole(stage, wanted ? q_tile_.tiles.keys - tile * C::kForward.keys : 0);
      } else {
        tiles_.copy_whole(stage, tile);
      }
      tile::commit<Arch>();
    }
  }

  // Waits for the queries and the first tile. Called before the first `consumer_wait`.
  TILEWISE_DEVICE void wait_for_queries() const { consumer_wait(); }

  // Waits until the tile to be read has arrived and no thread reads the stage to be written any
  // more. Called before the scores; then the values have arrived as well.
  TILEWISE_DEVICE void consumer_wait() const {
    tile::wait<Arch, kStages - 2>();
    ptx::sync_block();
  }
  TILEWISE_DEVICE ptx::SharedAddress keys() const { return read_; }
  TILEWISE_DEVICE ptx::SharedAddress values() const { return read_; }
  // Nothing to do: rows past the last key are copied as 0.
  TILEWISE_DEVICE void zero_values_past_end(const QueryTile&, int32_t) const {}
  // The stage of the tile is the next one to be written when its values have been read.
  TILEWISE_DEVICE void consumer_release(bool scores, int32_t) {
    if (!scores) read_ = read_ == base_ + kLastStageAt ? base_ : read_ + kStageBytes;
  }

  // See WarpPipeline::pages_fit. All threads of the CTA call it.
  TILEWISE_DEVICE bool pages_fit(const QueryTile& q_tile) const {
    constexpr int kPagesBarrier = 1;
    return !ptx::bar_any(kPagesBarrier, C::kForward.threads(), !rows_.fit(q_tile));
  }

  // While the scores of `tile` are computed, copies part `part` of the tile kStages - 1 before it.
  TILEWISE_DEVICE void load_ahead(bool scores, int32_t tile, int part) {
    if (!scores) return;
    const int32_t wanted = tile - (kStages - 1);
    const ptx::SharedAddress stage = read_ == base_ ? base_ + kLastStageAt : read_ - kStageBytes;
    if constexpr (C::kPaged) {
      if (part == 0) rows_.advance(saved_q_tile<C>(), wanted, tiles_);
      tiles_.copy(stage, rows_.has_tile(wanted), part);
    } else {
      tiles_.copy(stage, wanted, part);
    }
    if (part == kParts - 1) tile::commit<Arch>();
  }

  // Instead of the products of `tile`, in a warp without rows: copies its share of the next tile.
  TILEWISE_DEVICE void skip(int32_t tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_ahead(true, tile, part);
    consumer_release(false, tile);
  }

 private:
  const QueryTile& q_tile_;  // read before the loop only; the loop reads `saved_q_tile`
  Rows rows_;
  TileCopy tiles_;
  ptx::SharedAddress base_;
  ptx::SharedAddress read_;
  int32_t last_;
};

}  // namespace tilewise::cuda::mma_sync
