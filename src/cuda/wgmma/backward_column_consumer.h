// Accumulators and products of a consumer warpgroup of the backward by columns, and the stores of
// its results. A panel is 64 columns of the head; each warpgroup owns some panels of dQ, dK and dV.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tile/fragment.h"
#include "cuda/wgmma/backward_keys.h"
#include "cuda/wgmma/backward_tile.h"

namespace tilewise::cuda::wgmma {

// dV and dK of the panels of a warpgroup, transposed. With g = lane / 4 and t = lane % 4, value
// 4 j + e of a thread belongs to
//
//   column  16 warp + g + 8 (e / 2)    of the panel
//   key     8 j + 2 t + e % 2          of the CTA
template <class C, int kWarpgroup>
struct ColumnSums {
  using Plan = BackwardPlan<C>;
  float dv[Plan::dv_panels(kWarpgroup)][Plan::kKeys / 2];
  float dk[Plan::dk_panels(kWarpgroup)][Plan::kKeys / 2];

  TILEWISE_DEVICE void clear() {
    for_each([](auto& x) {
#pragma unroll
      for (float& y : x) y = 0.0f;
    });
  }
  TILEWISE_DEVICE void fence() {
    for_each([](auto& x) { ptx::fence_register(x); });
  }
  TILEWISE_DEVICE bool finite() {
    bool all = true;
    for_each([&](auto& x) { all = all && all_finite(x); });
    return all;
  }

 private:
  template <class Body>
  TILEWISE_DEVICE void for_each(const Body& body) {
#pragma unroll
    for (int i = 0; i < Plan::dv_panels(kWarpgroup); ++i) body(dv[i]);
#pragma unroll
    for (int i = 0; i < Plan::dk_panels(kWarpgroup); ++i) body(dk[i]);
  }
};

template <class C, int kWarpgroup>
class ColumnProducts {
  using Plan = BackwardPlan<C>;
  static constexpr int kKeys = Plan::kKeys;
  static constexpr int kHeadDim = kWarpgroup == 0 ? C::kHeadDim : C::kHeadDimV;
  using RowTile = tile::SwizzledTile<Plan::kQueries, kHeadDim>;  // Q or dO
  using KeyTile = tile::SwizzledTile<kKeys, kHeadDim>;           // K or V
  using ScoreTile = typename Plan::ScoreTile;
  template <int kN>
  using Wgmma = ptx::Wgmma<kN, C::kHalf>;

 public:
  // `first_dq_panel`: the warpgroup's first panel of dQ.
  TILEWISE_DEVICE ColumnProducts(ptx::SharedAddress shared, int first_dq_panel)
      : rows_(RowTile{shared + (kWarpgroup == 0 ? Plan::kQ : Plan::kDout)}.by_columns()),
        keys_(KeyTile{shared + (kWarpgroup == 0 ? Plan::kK : Plan::kV)}.by_columns()),
        dout_(typename Plan::DoutTile{shared + Plan::kDout}.by_rows(
            Plan::first_dv_panel(kWarpgroup))),
        q_(typename Plan::QTile{shared + Plan::kQ}.by_rows(Plan::first_dk_panel(kWarpgroup))),
        k_(typename Plan::KTile{shared + Plan::kK}.by_rows(first_dq_panel)),
        p_(ScoreTile{shared + Plan::kP}.by_columns()),
        ds_(ScoreTile{shared + Plan::kDs}.by_columns()),
        ds_keys_(ScoreTile{shared + Plan::kDs}.by_rows()) {
    if constexpr (Plan::kCluster == 2) {
      peer_k_ = typename Plan::PeerKTile{shared + Plan::kPeerK}.by_rows(kWarpgroup);
      peer_ds_ = ScoreTile{shared + Plan::kPeerDs}.by_rows();
    }
  }

  // S = Q K^T (warpgroup 0) or dP = dO V^T (warpgroup 1).
  TILEWISE_DEVICE void start_scores(float (&s)[kKeys / 2], int stage) const {
    const uint64_t rows = rows_ + (kWarpgroup == 0 ? stage_step<RowTile>(stage) : 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint64_t a = rows + RowTile::column_step(k);
      const uint64_t b = keys_ + KeyTile::column_step(k);
      if (k > 0)
        Wgmma<kKeys>::template add<false, false>(s, a, b);
      else
        Wgmma<kKeys>::template start<false, false>(s, a, b);
    }
    ptx::wgmma_commit_group();
  }

  // dV^T += dO^T P
  template <int kPanels>
  TILEWISE_DEVICE void add_dv(float (&dv)[kPanels][kKeys / 2], int stage) const {
    const uint64_t p = p_ + score_step(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
#pragma unroll
      for (int k = 0; k < Plan::kQueries / 16; ++k) {
        const uint64_t dout = dout_ + panel_step<typename Plan::DoutTile>(i);
        Wgmma<kKeys>::template add<true, false>(dv[i], dout + Plan::DoutTile::row_step(k),
                                                p + ScoreTile::column_step(k));
      }
    }
    ptx::wgmma_commit_group();
  }

  // dK^T += Q^T dS, for panel `i` of the warpgroup.
  TILEWISE_DEVICE void add_dk(float (&dk)[kKeys / 2], int i, int stage) const {
    using QTile = typename Plan::QTile;
    const uint64_t q = q_ + stage_step<QTile>(stage) + panel_step<QTile>(i);
    const uint64_t ds = ds_ + score_step(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Plan::kQueries / 16; ++k)
      Wgmma<kKeys>::template add<true, false>(dk, q + QTile::row_step(k),
                                              ds + ScoreTile::column_step(k));
    ptx::wgmma_commit_group();
  }

  // dQ^T = K^T dS^T, for the first panel of the warpgroup.
  TILEWISE_DEVICE void start_dq(float (&dq)[32], int stage) const {
    ptx::wgmma_fence();
    Wgmma<64>::template start<true, true>(dq, k_, ds_keys_ + score_step(stage));
    add_dq(dq, 0, stage);
    ptx::wgmma_commit_group();
  }
  // In a cluster: dQ over the keys of this CTA, then over those of the other CTA, whose dS must
  // have arrived here.
  TILEWISE_DEVICE void start_own_dq(float (&dq)[32]) const {
    ptx::wgmma_fence();
    Wgmma<64>::template start<true, true>(dq, k_, ds_keys_);
    add_dq(dq, 0, 0);
  }
  TILEWISE_DEVICE void add_peer_dq(float (&dq)[32]) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<64>::template add<true, true>(dq, peer_k_ + Plan::PeerKTile::row_step(k),
                                          peer_ds_ + ScoreTile::row_step(k));
    ptx::wgmma_commit_group();
  }
  // dQ^T of the second panel, in the same registers. If this were a product that starts anew, ptxas
  // would compute it beside the first one and spill.
  TILEWISE_DEVICE void restart_dq(float (&dq)[32], int stage) const {
    ptx::wgmma_fence();
    Wgmma<64>::template restart<true, true>(dq, k_ + panel_step<typename Plan::KTile>(1),
                                            ds_keys_ + score_step(stage));
    add_dq(dq, 1, stage);
    ptx::wgmma_commit_group();
  }

 private:
  // Adds the products of all but the first 16 keys.
  TILEWISE_DEVICE void add_dq(float (&dq)[32], int i, int stage) const {
    using KTile = typename Plan::KTile;
    const uint64_t ds = ds_keys_ + score_step(stage);
#pragma unroll
    for (int k = 1; k < kKeys / 16; ++k)
      Wgmma<64>::template add<true, true>(dq, k_ + panel_step<KTile>(i) + KTile::row_step(k),
                                          ds + ScoreTile::row_step(k));
  }

  static TILEWISE_DEVICE uint64_t score_step(int stage) {
    return Plan::kScoreStages == 1 ? 0 : stage_step<ScoreTile>(stage);
  }
  template <class Tile>
  static TILEWISE_DEVICE uint64_t stage_step(int stage) {
    return static_cast<uint64_t>(stage * (Tile::kBytes >> 4));
  }
  template <class Tile>
  static TILEWISE_DEVICE constexpr uint64_t panel_step(int panel) {
    return static_cast<uint64_t>(panel * (Tile::kPanelBytes >> 4));
  }

  uint64_t rows_, keys_, dout_, q_, k_, p_, ds_, ds_keys_;
  uint64_t peer_k_ = 0, peer_ds_ = 0;
};

// Adds dQ of a warp to dq_sum, 16 columns of a panel at a time.
template <class C>
class DqReduction {
  using Plan = BackwardPlan<C>;
  // Floats of a slice, which one warp adds; a panel has four slices.
  static constexpr int kSlice = Plan::kDqSliceBytes / 4;
  static constexpr int kWarps = Plan::kCluster * Plan::kConsumerThreads / ptx::kWarpSize;

 public:
  TILEWISE_DEVICE DqReduction(const TmaBackwardParams& p, const TileDescriptor& work_tile, int warp)
      : to_(p.dq_sum + warp * kSlice + ptx::lane_index() * 4),
        semaphores_(p.dq_semaphores),
        order_(p, work_tile) {}

  TILEWISE_DEVICE void add(const float (&dq)[32], const RowWalk& walk, int panel) const {
    float* to = to_ + int64_t{walk.index} * Plan::kDqTile + panel * (4 * kSlice);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      ptx::red_add_v4_f32(to + i * 128, x);
    }
  }

  // For deterministic sums: key tiles add in semaphore order, and every warp of the cluster
  // releases the semaphore once.
  TILEWISE_DEVICE void acquire(const RowWalk& walk) const {
    if (semaphores_ == nullptr) return;
    const int32_t releases = ptx::uniform(kWarps * order_.at(walk.row));
    while (ptx::uniform(ptx::ld_acquire(semaphores_ + walk.index)) < releases) {
    }
  }
  TILEWISE_DEVICE void release(const RowWalk& walk) const {
    if (semaphores_ == nullptr) return;
    ptx::fence_device();
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::red_release_add_s32(semaphores_ + walk.index, 1);
  }

 private:
  float* to_;
  int32_t* semaphores_;
  SemaphoreOrder<C> order_;
};

// Writes scale * sums of a panel to shared memory, as rows of keys.
template <class C, class Tile>
TILEWISE_DEVICE void write_columns(const float (&sums)[BackwardPlan<C>::kKeys / 2], float scale,
                                   const Tile& to, int panel, int warp) {
  const int lane = ptx::lane_index();
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = panel * 8 + warp * 2 + lane / 8 % 2;
  const ptx::SharedAddress at = to.base + static_cast<uint32_t>(Tile::chunk_offset(row, chunk));
#pragma unroll
  for (int k = 0; k < BackwardPlan<C>::kKeys / 16; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[e] = tile::pack<typename C::Element>(sums[8 * k + 2 * e] * scale,
                                             sums[8 * k + 2 * e + 1] * scale);
    ptx::stmatrix_x4_trans(at + static_cast<uint32_t>(k * 16 * tile::kSwizzledRowBytes), x);
  }
}

// Stores panels of dK or dV from shared to global memory; called by a warpgroup. `offset` is
// that of the first key.
template <class C, class Tile>
TILEWISE_DEVICE void store_panels(const Tile& from, const tilewise_tensor& view, int64_t offset,
                                  int keys, int first, int count, int64_t columns) {
  using Storage = typename C::Element::Storage;
  if (view.data == nullptr) return;
  const int chunks = count * 8;
  Storage* const to = static_cast<Storage*>(view.data) + offset;
#pragma unroll 1
  for (int i = ptx::thread_index() % ptx::kWarpgroupSize; i < keys * chunks;
       i += ptx::kWarpgroupSize) {
    const int row = i / chunks;
    const int chunk = first * 8 + i % chunks;
    if (chunk * 8 >= columns) continue;
    uint32_t x[4];
    ptx::ld_shared_v4_b32(x, from.base + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)));
    ptx::st_global_v4_b32(to + row * view.stride_row + chunk * 8, x);
  }
}

}  // namespace tilewise::cuda::wgmma
