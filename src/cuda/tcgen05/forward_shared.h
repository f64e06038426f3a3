// Shared and tensor memory of a forward CTA: tiles of Q, K and V, barriers, the work tile, and what
// the softmax warps tell the correction warps about each row.
#pragma once

#include "cuda/common/pipeline.h"
#include "cuda/common/query_tile.h"
#include "cuda/tcgen05/config.h"

namespace tilewise::cuda::tcgen05 {

struct Barrier : common::Barrier {
  // Far longer than the work of a CTA, which takes milliseconds. No GPU has run these kernels: what
  // the emulator cannot know should end in an error and not in a wait for ever.
  static constexpr uint64_t kLongestWait = 2'000'000'000;  // nanoseconds

  TILEWISE_DEVICE void wait(int parity) const {
    ptx::mbarrier_wait_parity_or_trap(address, parity, kLongestWait);
  }
  // One lane arrives for its warp.
  TILEWISE_DEVICE void arrive_as_warp() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) arrive();
  }
  // Arrives when all products are done that the thread has issued.
  TILEWISE_DEVICE void arrive_after_products() const { ptx::tcgen05_commit(address); }
};

template <class C>
struct ForwardShared {
  static constexpr arch::Tcgen05ForwardTile kTile = C::kForward;
  static constexpr int kQTiles = arch::Tcgen05ForwardTile::kQTiles;
  static constexpr int kRows = arch::Tcgen05ForwardTile::kRows;
  static_assert(kTile.keys == kRows, "tiles of Q, K and V have the same size");
  using Tile = tile::SwizzledTile<kRows, C::kHeadDim>;
  using Pipeline = common::PipelineState<kTile.stages>;

  static constexpr int kKvAt = kQTiles * Tile::kBytes;
  static constexpr int kBarriersAt = kKvAt + kTile.stages * Tile::kBytes;
  static constexpr int kBarriers = 2 * kTile.stages + 6 * kQTiles + 1;
  static constexpr int kTensorAt = kBarriersAt + 8 * kBarriers;
  static constexpr int kWorkTileAt = round_up(kTensorAt + 4, 16);
  static constexpr int kFactorsAt = round_up(kWorkTileAt + int{sizeof(QueryTile)}, 16);
  static constexpr int kBytes = kFactorsAt + kQTiles * kRows * 4;

  // Columns of tensor memory: the scores of tile t from 128 t on, overwritten by its weights, and
  // the sums of its output from 256 + 128 t on.
  static constexpr uint32_t kOutAt = 256;
  static constexpr uint32_t kTileColumns = 128;

  ptx::SharedAddress base;

  TILEWISE_DEVICE static ForwardShared of_this_cta() {
    return {ptx::shared_address(ptx::shared_memory())};
  }

  TILEWISE_DEVICE Tile q(int t) const { return {at(t * Tile::kBytes)}; }
  TILEWISE_DEVICE Tile kv(int stage) const { return {at(kKvAt + stage * Tile::kBytes)}; }
  TILEWISE_DEVICE QueryTile& work_tile() const {
    return *reinterpret_cast<QueryTile*>(ptx::shared_memory() + kWorkTileAt);
  }

  // The address of the allocated columns, and tiles in them.
  TILEWISE_DEVICE ptx::SharedAddress tensor_at() const { return at(kTensorAt); }
  TILEWISE_DEVICE ptx::TensorAddress scores(int t) const {
    return ptx::ld_shared_b32(tensor_at()) + static_cast<uint32_t>(t) * kTileColumns;
  }
  TILEWISE_DEVICE ptx::TensorAddress out(int t) const { return scores(t) + kOutAt; }
  // The first lane of those that the warp of tile row `row` can access.
  TILEWISE_DEVICE static ptx::TensorAddress lanes_of(int row) {
    return static_cast<uint32_t>(row / ptx::kWarpSize * ptx::kWarpSize) << 16;
  }

  // The factor of the sums of each row.
  TILEWISE_DEVICE ptx::SharedAddress factor(int t, int row) const {
    return at(kFactorsAt + 4 * (t * kRows + row));
  }
  // m and l of each row, where Q was: the last scores of the tile have been computed.
  TILEWISE_DEVICE ptx::SharedAddress row_m(int t, int row) const {
    return q(t).base + static_cast<uint32_t>(4 * row);
  }
  TILEWISE_DEVICE ptx::SharedAddress row_l(int t, int row) const { return row_m(t, kRows + row); }

  TILEWISE_DEVICE Barrier kv_full(int stage) const { return barrier(stage); }
  TILEWISE_DEVICE Barrier kv_empty(int stage) const { return barrier(kTile.stages + stage); }
  TILEWISE_DEVICE Barrier q_full(int t) const { return barrier(2 * kTile.stages + t); }
  TILEWISE_DEVICE Barrier scores_full(int t) const { return q_full(kQTiles + t); }
  // The weights are written and the sums are scaled.
  TILEWISE_DEVICE Barrier weights_full(int t) const { return q_full(2 * kQTiles + t); }
  TILEWISE_DEVICE Barrier factors_full(int t) const { return q_full(3 * kQTiles + t); }
  // m and l are written. Not factors_full: between the last factor and these, nothing waits for
  // the correction warps, which would miss a phase.
  TILEWISE_DEVICE Barrier rows_full(int t) const { return q_full(4 * kQTiles + t); }
  TILEWISE_DEVICE Barrier out_full(int t) const { return q_full(5 * kQTiles + t); }
  // The last V tile of a sequence has landed, with rows past the end of the sequence.
  TILEWISE_DEVICE Barrier v_tail_full() const { return q_full(6 * kQTiles); }

  // Called by one thread; the others see the barriers after the CTA's first barrier.
  TILEWISE_DEVICE void init_barriers() const {
    constexpr int kWarpsPerTile = kRows / ptx::kWarpSize;
    for (int i = 0; i < kTile.stages; ++i) {
      kv_full(i).init(1);
      kv_empty(i).init(1);
    }
    for (int t = 0; t < kQTiles; ++t) {
      q_full(t).init(1);
      scores_full(t).init(1);
      weights_full(t).init(2 * kWarpsPerTile);  // softmax and correction warps
      factors_full(t).init(kWarpsPerTile);
      rows_full(t).init(kWarpsPerTile);
      out_full(t).init(1);
    }
    v_tail_full().init(1);
    ptx::fence_mbarrier_init();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int bytes) const {
    return base + static_cast<uint32_t>(bytes);
  }
  TILEWISE_DEVICE Barrier barrier(int index) const { return {{at(kBarriersAt + 8 * index)}}; }
};

}  // namespace tilewise::cuda::tcgen05
