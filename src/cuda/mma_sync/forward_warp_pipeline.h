// The K/V pipeline of decoding with TMA (sm_90). Each warp has a pipeline of its own and is both
// producer and consumer: it loads a stage itself after it has read it, so stages have full barriers
// but no empty barriers.
//
// Roles: lane 0 (or an elected lane) issues the TMA loads of a stage; where pages are smaller than
// a TMA box, all lanes copy rows with cp.async (forward_row_load.h). All lanes compute.
//
// Loads 0, 1, 2, 3, ... are K and V of the last key tile, K and V of the one before, and so on;
// load f goes to stage f % kStages. Timeline with 3 stages, for key tiles t, t - 1, ...:
//   stage 0   wait full K(t)      S = Q K^T   load V(t - 1)
//                                 softmax     V(t), K(t - 1), V(t - 1) are in flight
//   stage 1   wait full V(t)      O += P V    load K(t - 2)
//   stage 2   wait full K(t - 1)  S = Q K^T   load V(t - 2)
//                                 softmax     V(t - 1), K(t - 2), V(t - 2) are in flight
//   stage 0   wait full V(t - 1)  ...
// After the loop the stages serve to combine splits (CombineBuffer).
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_combine.h"
#include "cuda/mma_sync/forward_row_load.h"
#include "cuda/mma_sync/forward_tma_load.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/panels.h"

namespace tilewise::cuda::mma_sync {

// With contiguous keys the plan may use fewer stages than the kernel has (plan_decode.h).
template <class C>
class WarpPipeline {
 public:
  static_assert(C::kForward.warps == 1);
  using Arch = typename C::Arch;
  using Loader = std::conditional_t<C::kTma, TmaLoader<C>, RowLoader<C>>;
  using Params = ForwardParamsOf<C>;
  using Tile = StageTile<C>;
  using KeyLanes = tile::PanelOffsets<Tile, tile::Lanes::chunks_first>;
  using ValueLanes = std::conditional_t<
      C::kFloat8, tile::Float8B<C::kConverts, tile::PanelOffsets<Tile, tile::Lanes::rows_first>>,
      tile::PanelB<typename C::Element, Tile>>;
  static_assert(Tile::kBytes == kStageBytes<C>);
  static constexpr int kStages = C::kForward.stages;
  static constexpr bool kMayUseFewerStages = C::kTma && !C::kPaged && !C::kFloat8;
  static_assert(kMaxCombineBytes<C> <= kStages * Tile::kBytes);
  static constexpr int kCombineBarrierAt = kStages * 8;  // after the full barriers
  static constexpr int kLoaderAt = kCombineBarrierAt + 8;
  static constexpr int kStagesAt = static_cast<int>(round_up(kLoaderAt + Loader::kBytes, 1024));
  static constexpr int kBytes = kStagesAt + kStages * Tile::kBytes;
  static constexpr int kParts = 1;  // of load_ahead

  // Runs before the kernel waits for the launch before it, since nothing here depends on that.
  TILEWISE_DEVICE static void prepare(const Params& p, ptx::SharedAddress base) {
    if (ptx::lane_index() != 0) return;
    Loader::prepare(p);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage)
      ptx::mbarrier_init(base + stage * 8, Loader::kArrivals);
    ptx::mbarrier_init(base + kCombineBarrierAt, 1);
    ptx::fence_mbarrier_init();
  }

  // Called as soon as the sequence is known: prefetches its block table, if it has one.
  TILEWISE_DEVICE static void prefetch(const Problem& p, int32_t sequence,
                                       ptx::SharedAddress base) {
    if constexpr (C::kPaged)
      prefetch_pages<Loader::kPrefetchSectors>(p, sequence, base + kLoaderAt + Loader::kPrefetchAt);
  }

  // Tile `last` is the first one to be loaded.
  TILEWISE_DEVICE WarpPipeline(const Params& p, const QueryTile& q_tile, int32_t last,
                               ptx::SharedAddress base)
      : base_(base),
        loader_(p, q_tile, last, base + kLoaderAt),
        first_(ptx::uniform(q_tile.tiles.first)),
        last_(last) {
    if constexpr (kMayUseFewerStages) {
      if (p.stages > 0) stages_in_use_ = p.stages;
    }
    ptx::sync_warp();  // one lane has initialised the barriers
  }

  // Loads the queries and the last key tile, which are needed however many chunks the sequence
  // turns out to have. The queries are needed together with the first keys, before any values.
  template <class Queries>
  TILEWISE_DEVICE void start(Queries&& load_queries) {
    load_first(true, 0);
    load_queries();
    tile::commit<Arch>();
    load_first(false, 1);
  }

  // Restricts the loads to tiles from `first` on. The tile that a second warp loads first may lie
  // before `first`. If its loads have been issued, the warp waits for them here, because their
  // stages are written again.
  TILEWISE_DEVICE void narrow_to(int32_t first) {
    const bool loads_issued = last_ >= first_;
    first_ = ptx::uniform(first);
    if (C::kWarpSplits == 1 || !loads_issued || last_ >= first_) return;
    ptx::mbarrier_wait_parity(barrier(0), 0);
    ptx::mbarrier_wait_parity(barrier(1), 0);
  }

  // Loads the remaining stages.
  TILEWISE_DEVICE void fill_stages() {
#pragma unroll
    for (int i = 2; i < kStages; ++i) {
      if (i < stages()) load(i % 2 == 0, last_ - i / 2 * C::kWarpSplits, i);
    }
  }

  // Waits for the queries. Called before the first `consumer_wait`.
  TILEWISE_DEVICE void wait_for_queries() const {
    zero_rows_not_loaded();
    tile::wait<Arch, 0>();
    ptx::sync_warp();
  }

  // Waits until the stage to be read is full.
  TILEWISE_DEVICE void consumer_wait() const { ptx::mbarrier_wait_parity(barrier(stage_), phase_); }
  TILEWISE_DEVICE ptx::SharedAddress keys() const { return at(stage_); }
  TILEWISE_DEVICE ptx::SharedAddress values() const { return at(stage_); }

  // Zeroes the rows past the last key that a TMA box has loaded with the last values. A masked key
  // has weight 0, and 0 * NaN of a row outside of the sequence would be NaN. Rows of K need no
  // zeros, since masked scores are replaced.
  TILEWISE_DEVICE void zero_values_past_end(const QueryTile& q_tile, int32_t tile) const {
    if constexpr (!C::kTma) return;
    const int32_t begin = q_tile.tiles.keys - tile * Tile::kRows;
    if (begin >= Tile::kRows) return;
    zero_rows(stage_, begin, tail_box_rows(begin));
    ptx::fence_proxy_async();  // the stage is loaded again
    ptx::sync_warp();
  }

  // Called when the keys (`scores`) or values of `tile` have been read. If they were load f, load
  // f + stages() now goes to their stage.
  TILEWISE_DEVICE void consumer_release(bool scores, int32_t tile) {
    ptx::sync_warp();
    const bool keys = scores == (stages() % 2 == 0);
    load(keys, tile - (scores ? stages() : stages() + 1) / 2 * C::kWarpSplits, stage_);
    if (++stage_ == stages()) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }
  // The products call this; here stages are loaded by consumer_release instead.
  TILEWISE_DEVICE void load_ahead(bool, int32_t, int) const {}

  // After the loop: whether all pages lie inside the tensors.
  TILEWISE_DEVICE bool pages_fit(const QueryTile& q_tile) const {
    return !ptx::any(!loader_.pages_fit(q_tile));
  }
  // Allows the other CTAs of the cluster to write to the stages.
  TILEWISE_DEVICE void release_to_cluster() const {
    if constexpr (!C::kTma) ptx::fence_proxy_async();
    ptx::barrier_cluster_arrive_relaxed();
  }
  TILEWISE_DEVICE CombineBuffer combine_buffer() const {
    return {at(0), base_ + kCombineBarrierAt, 0};
  }

 private:
  TILEWISE_DEVICE int stages() const {
    if constexpr (kMayUseFewerStages) return stages_in_use_;
    return kStages;
  }
  TILEWISE_DEVICE ptx::SharedAddress at(int stage) const {
    return base_ + static_cast<uint32_t>(kStagesAt + stage * Tile::kBytes);
  }
  TILEWISE_DEVICE ptx::SharedAddress barrier(int stage) const {
    return base_ + static_cast<uint32_t>(stage * 8);
  }

  TILEWISE_DEVICE void load(bool keys, int32_t tile, int stage) {
    if (tile >= first_) loader_.load(keys, tile, {at(stage), barrier(stage)});
  }
  // Loads the tile that is read first.
  TILEWISE_DEVICE void load_first(bool keys, int stage) {
    if (last_ >= first_) loader_.load_first(keys, last_, {at(stage), barrier(stage)});
  }

  // Zeroes the rows of the first tile that are not loaded, while its other rows are loading.
  TILEWISE_DEVICE void zero_rows_not_loaded() const {
    const int32_t rows = last_ < first_ ? Tile::kRows : loader_.first_tile_rows(last_);
    if (rows == Tile::kRows) return;
    zero_rows(0, rows, Tile::kRows);
    zero_rows(1, rows, Tile::kRows);
    ptx::fence_proxy_async();  // the stages are loaded again
  }
  TILEWISE_DEVICE void zero_rows(int stage, int32_t begin, int32_t end) const {
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = begin * 8 + ptx::lane_index(); i < end * 8; i += ptx::kWarpSize) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::st_shared_v4_b32(at(stage) + static_cast<uint32_t>(panel * Tile::kPanelBytes + i * 16),
                              zeros);
    }
  }

  ptx::SharedAddress base_;
  Loader loader_;
  int32_t first_;  // the first tile to load
  int32_t last_;
  int stages_in_use_ = kStages;
  int stage_ = 0;  // to be read
  int phase_ = 0;  // of its full barrier
};

}  // namespace tilewise::cuda::mma_sync
