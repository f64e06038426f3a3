// Shared memory of a forward CTA: tiles of Q, K and V, barriers, descriptors of work tiles, bias or
// mask.
#pragma once

#include "cuda/arch/limits.h"
#include "cuda/common/tile_coverage.h"
#include "cuda/wgmma/forward_tile.h"
#include "cuda/wgmma/mask_shared.h"

namespace tilewise::cuda::wgmma {

using common::Barrier;
using common::PipelineState;

template <class C>
struct ForwardShared {
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  static constexpr int kConsumerWarps = 4 * kTile.consumer_warpgroups;
  // The scheduler runs ahead: at least the next tile is described while the results of one are
  // still being stored.
  static constexpr int kTileStages = 4;
  static constexpr int kMaskWarps = C::kMasked ? 2 : 0;

  using WorkTile = ForwardWorkTile<C>;
  // Tiles count columns in units of 16 bits.
  template <int kRows, int kColumns>
  using Tile = tile::SwizzledTile<kRows, kColumns * C::Element::kBytes / 2>;
  using QTile = Tile<64, C::kHeadDim>;  // of a warpgroup
  using KTile = Tile<kTile.keys, C::kHeadDim>;
  // Values of float8 are transposed (transposed_values.h).
  using VTile = std::conditional_t<C::kFloat8, Tile<C::kHeadDimV, kTile.keys>,
                                   Tile<kTile.keys, C::kHeadDimV>>;
  static constexpr int kBoxColumns = tile::kSwizzledRowBytes / C::Element::kBytes;
  using QPipeline = PipelineCounter<kTile.q_buffers>;
  using KvPipeline = PipelineCounter<kTile.stages>;
  using TilePipeline = PipelineCounter<kTileStages>;

  static constexpr int kQBytes = kTile.consumer_warpgroups * QTile::kBytes;
  static constexpr int kKAt = kTile.q_buffers * kQBytes;
  static constexpr int kVAt = kKAt + kTile.stages * KTile::kBytes;
  static constexpr int kBarriersAt = kVAt + kTile.stages * VTile::kBytes;
  static constexpr int kBarriersBeforeMask =
      2 * kTile.q_buffers + 4 * kTile.stages + 3 * kTileStages + 1;
  static constexpr int kBarriers = kBarriersBeforeMask + (C::kMasked ? kMaskBarriers : 0);
  static constexpr int kTilesAt = round_up(kBarriersAt + 8 * kBarriers, 16);
  static constexpr int kTilesEnd = round_up(kTilesAt + kTileStages * sizeof(WorkTile), 16);
  // Per consumer warp: 16 bits for each of its rows and each key of a tile.
  static constexpr int kBiasBytes = arch::WgmmaForwardTile::kRowsPerWarp * kTile.keys * 2;
  static constexpr int kBiasAt = round_up(kTilesEnd, 128);
  static constexpr int kBiasEnd = kBiasAt + kConsumerWarps * kBiasBytes;
  // Whether shared memory has room for bias tiles: not at D192 with 128 value columns, and not at
  // D256. There a bias is loaded element by element.
  static constexpr bool kHasBias =
      C::kGeneral && kBiasEnd <= arch::limits_of(C::Arch::kTable / 10).shared_bytes;
  // In the masked form: windows and bits, and the mask as each mask warp reads it.
  using MaskRegion = MaskShared<MaskLayout{.rows = kTile.rows(),
                                           .keys = kTile.keys,
                                           .mask_warps = kMaskWarps,
                                           .consumer_warps = kConsumerWarps,
                                           .other_warps = 1,  // the producer warp
                                           .barriers_at = kBarriersAt + 8 * kBarriersBeforeMask,
                                           .at = kTilesEnd}>;
  static constexpr int kMasksAt = MaskRegion::kEnd;
  static constexpr int kMaskEnd = kMasksAt + kMaskWarps * static_cast<int>(sizeof(common::CtaMask));
  static constexpr int kBytes = C::kMasked ? kMaskEnd : kHasBias ? kBiasEnd : kTilesEnd;

  ptx::SharedAddress base;

  TILEWISE_DEVICE static ForwardShared of_this_cta() {
    return {ptx::shared_address(ptx::shared_memory())};
  }

  TILEWISE_DEVICE QTile q(int buffer, int warpgroup) const {
    return {at(buffer * kQBytes + warpgroup * QTile::kBytes)};
  }
  TILEWISE_DEVICE KTile k(int stage) const { return {at(kKAt + stage * KTile::kBytes)}; }
  TILEWISE_DEVICE VTile v(int stage) const { return {at(kVAt + stage * VTile::kBytes)}; }
  TILEWISE_DEVICE WorkTile& work_tile(int stage) const {
    return *reinterpret_cast<WorkTile*>(ptx::shared_memory() + kTilesAt +
                                        stage * static_cast<int>(sizeof(WorkTile)));
  }

  TILEWISE_DEVICE ptx::SharedAddress bias(int consumer_warp) const {
    return at(kBiasAt + consumer_warp * kBiasBytes);
  }

  TILEWISE_DEVICE MaskRegion mask_region() const { return {base}; }
  TILEWISE_DEVICE common::CtaMask& mask(int mask_warp) const {
    return *reinterpret_cast<common::CtaMask*>(
        ptx::shared_memory() + kMasksAt + mask_warp * static_cast<int>(sizeof(common::CtaMask)));
  }

  TILEWISE_DEVICE Barrier k_full(int stage) const { return barrier(stage); }
  TILEWISE_DEVICE Barrier k_empty(int stage) const { return barrier(kTile.stages + stage); }
  TILEWISE_DEVICE Barrier v_full(int stage) const { return barrier(2 * kTile.stages + stage); }
  TILEWISE_DEVICE Barrier v_empty(int stage) const { return barrier(3 * kTile.stages + stage); }
  TILEWISE_DEVICE Barrier q_full(int buffer) const { return barrier(4 * kTile.stages + buffer); }
  TILEWISE_DEVICE Barrier q_empty(int buffer) const { return q_full(kTile.q_buffers + buffer); }
  TILEWISE_DEVICE Barrier tile_full(int stage) const { return q_full(2 * kTile.q_buffers + stage); }
  TILEWISE_DEVICE Barrier tile_empty(int stage) const { return tile_full(kTileStages + stage); }
  // Completes before tile_full: the fields that the producer needs are written.
  TILEWISE_DEVICE Barrier tile_located(int stage) const { return tile_empty(kTileStages + stage); }
  // The last V tile of a sequence has landed, with rows past the end of the sequence.
  TILEWISE_DEVICE Barrier v_tail_full() const { return tile_located(kTileStages); }

  // Called by one thread; the others see the barriers after the CTA's first barrier.
  TILEWISE_DEVICE void init_barriers() const {
    for (int i = 0; i < kTile.stages; ++i) {
      k_full(i).init(1);
      k_empty(i).init(kConsumerWarps);
      v_full(i).init(1);
      v_empty(i).init(kConsumerWarps);
    }
    for (int i = 0; i < kTile.q_buffers; ++i) {
      q_full(i).init(1);
      q_empty(i).init(kConsumerWarps);
    }
    for (int i = 0; i < kTileStages; ++i) {
      tile_full(i).init(kTile.consumer_warpgroups);  // the writing lanes of the scheduler warp
      // The consumer warps, the producer warp and the mask warps.
      tile_empty(i).init(kConsumerWarps + 1 + kMaskWarps);
      tile_located(i).init(1);
    }
    v_tail_full().init(1);
    if constexpr (C::kMasked) mask_region().init_barriers();
    ptx::fence_mbarrier_init();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int bytes) const {
    return base + static_cast<uint32_t>(bytes);
  }
  TILEWISE_DEVICE Barrier barrier(int index) const { return {at(kBarriersAt + 8 * index)}; }
};

}  // namespace tilewise::cuda::wgmma
