// Layout of shared memory and barriers of a backward CTA.
//
// With head dims up to 128 the consumer warpgroups divide the keys of the CTA among them, and each
// keeps dK and dV of its keys in registers (backward_by_keys.cuh). With larger ones they divide the
// columns of the head; one warpgroup computes P and the other dS (backward_by_columns.cuh).
#pragma once

#include "cuda/common/tile_coverage.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/wgmma/backward_sums.h"
#include "cuda/wgmma/mask_shared.h"

namespace tilewise::cuda::wgmma {

// Whether the backward is by columns. The backward by keys is persistent, the other one is not.
template <class C>
inline constexpr bool kByColumns = max(C::kHeadDim, C::kHeadDimV) > 128;

template <class C, bool = kByColumns<C>>
struct BackwardPlan;

// The mbarriers of a CTA, named for what is true when a phase completes. Those that take a stage
// exist once per stage.
struct BackwardBarriers {
  ptx::SharedAddress base;

  TILEWISE_DEVICE ptx::SharedAddress k_full() const { return at(kKFull); }
  TILEWISE_DEVICE ptx::SharedAddress v_full() const { return at(kVFull); }
  // No warp reads K and V of the work tile any more; only its epilogue still reads its descriptor.
  TILEWISE_DEVICE ptx::SharedAddress kv_empty() const { return at(kKvEmpty); }
  // The last Q or dO of a sequence has landed, with rows past the end of the sequence.
  TILEWISE_DEVICE ptx::SharedAddress tail_full() const { return at(kTailFull); }
  TILEWISE_DEVICE ptx::SharedAddress q_full(int stage) const { return at(kQFull, stage); }
  TILEWISE_DEVICE ptx::SharedAddress q_empty(int stage) const { return at(kQEmpty, stage); }
  TILEWISE_DEVICE ptx::SharedAddress dout_full(int stage) const { return at(kDoutFull, stage); }
  TILEWISE_DEVICE ptx::SharedAddress dout_empty(int stage) const { return at(kDoutEmpty, stage); }
  TILEWISE_DEVICE ptx::SharedAddress descriptor_full(int stage) const {
    return at(kDescriptorFull, stage);
  }
  // In a cluster: the dS of the other CTA has arrived here; this CTA's dS has been read there.
  TILEWISE_DEVICE ptx::SharedAddress peer_ds_full() const { return at(kPeerDsFull); }
  TILEWISE_DEVICE ptx::SharedAddress peer_ds_empty() const { return at(kPeerDsEmpty); }

  static constexpr int bytes(int descriptor_stages) {
    return (kDescriptorFull + descriptor_stages) * 8;
  }

  // Called by one thread; a barrier of the CTA or the cluster follows.
  TILEWISE_DEVICE void init(int consumer_warps, int reduction_warps, int empty_arrivals,
                            int descriptor_stages) const {
    for (const auto barrier : {k_full(), v_full(), tail_full(), peer_ds_full()})
      ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init(kv_empty(), consumer_warps + reduction_warps);
    ptx::mbarrier_init(peer_ds_empty(), consumer_warps);
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init(q_empty(stage), empty_arrivals);
      ptx::mbarrier_init(dout_empty(stage), empty_arrivals);
    }
    for (int stage = 0; stage < descriptor_stages; ++stage)
      ptx::mbarrier_init(descriptor_full(stage), 1);
    ptx::fence_mbarrier_init();
  }

 private:
  // Where the stages of a barrier begin; those of the descriptors are last, because their number
  // differs.
  enum First : int {
    kKFull,
    kVFull,
    kKvEmpty,
    kTailFull,
    kQFull,
    kQEmpty = kQFull + 2,
    kDoutFull = kQEmpty + 2,
    kDoutEmpty = kDoutFull + 2,
    kPeerDsFull = kDoutEmpty + 2,
    kPeerDsEmpty,
    kDescriptorFull,
  };

  TILEWISE_DEVICE ptx::SharedAddress at(First first, int stage = 0) const {
    return base + static_cast<uint32_t>((first + stage) * 8);
  }
};

// The plan by keys. Q, dO, dS and the row statistics have two stages. The CTA is persistent: while
// dK and dV of one work tile are stored through the shared memory of dS, the loads of the next one
// arrive.
template <class C>
struct BackwardPlan<C, false> : BackwardSums<C> {
  using BackwardSums<C>::kQueries;
  static constexpr arch::WgmmaBackwardTile kTile = C::kBackward;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kConsumerThreads = 256;
  static constexpr int kReductionWarps = 2;
  // Arrivals that empty a stage of Q or dO. Every thread that has read row statistics arrives
  // itself, because racecheck does not accept that one lane arrives for its warp.
  static constexpr int kEmptyArrivals = kConsumerThreads;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kCluster = kTile.cluster_size;
  static_assert(kKeys == 128 && kCluster == 1);
  // Whether dq is sent when the next S and dP have been issued. The general form does so instead of
  // sending it while P is computed: its loop for all options computes P and dS together.
  static constexpr bool kSendsUnderScores = kTile.send == arch::SendDq::under_scores ||
                                            (C::kGeneral && kTile.send == arch::SendDq::under_dp);
  static constexpr int kStages = 2;
  static constexpr int kDoutStages = 2;

  using KTile = tile::SwizzledTile<kKeys, C::kHeadDim>;
  using VTile = tile::SwizzledTile<kKeys, C::kHeadDimV>;
  using QTile = tile::SwizzledTile<kQueries, C::kHeadDim>;
  using DoutTile = tile::SwizzledTile<kQueries, C::kHeadDimV>;
  using DsTile = tile::SwizzledTile<kQueries, kKeys>;
  using WarpKeysTile =
      tile::SwizzledTile<16, max(C::kHeadDim, C::kHeadDimV)>;  // dK or dV of a warp
  static_assert(kConsumerThreads / 32 * WarpKeysTile::kBytes <= kStages * DsTile::kBytes);
  static constexpr int kStatisticBytes = kQueries * 4;
  // Offsets in shared memory, in bytes.
  static constexpr int kK = 0;
  static constexpr int kV = kK + KTile::kBytes;
  static constexpr int kQ = kV + VTile::kBytes;
  static constexpr int kDout = kQ + kStages * QTile::kBytes;
  static constexpr int kDs = kDout + kDoutStages * DoutTile::kBytes;
  static constexpr int kDq = kDs + kStages * DsTile::kBytes;
  static constexpr int kLse = kDq + kQueries * C::kHeadDim * 4;
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  // The loads of a work tile end when the previous one has released its keys, whose epilogue may
  // still read its descriptor. That of the next one is then in flight. The masked form fetches it
  // when the loads begin, while the previous work tile is computed and the one before stored.
  static constexpr int kDescriptorStages = 4;
  static constexpr int kDescriptors = kDelta + kDoutStages * kStatisticBytes;
  static constexpr int kBarriers = kDescriptors + kDescriptorStages * int{sizeof(TileDescriptor)};
  static constexpr int kBarriersEnd = kBarriers + BackwardBarriers::bytes(kDescriptorStages);
  // In the masked form: windows and bits, and the mask as the mask warp reads it.
  using MaskRegion =
      MaskShared<MaskLayout{.rows = kKeys,
                            .keys = kQueries,
                            .mask_warps = 1,
                            .consumer_warps = kConsumerThreads / ptx::kWarpSize,
                            .other_warps = 1 + kReductionWarps,  // with the producer warp
                            .barriers_at = kBarriersEnd,
                            .at = round_up(kBarriersEnd + 8 * kMaskBarriers, 16)}>;
  static constexpr int kCtaMask = MaskRegion::kEnd;
  static constexpr int kSharedBytes =
      C::kMasked ? kCtaMask + static_cast<int>(sizeof(common::CtaMask)) : kBarriersEnd;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The plan by columns. dO has one stage, and dQ is added from registers. In a cluster P and dS also
// have one stage, and there is room for the dS of the other CTA and for half of the columns of its
// K: this CTA sums these columns of dQ.
template <class C>
struct BackwardPlan<C, true> : BackwardSums<C> {
  using BackwardSums<C>::kQueries;
  static constexpr arch::WgmmaBackwardTile kTile = C::kBackward;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kConsumerThreads = 256;
  static constexpr int kReductionWarps = 0;
  // The threads of the warpgroup that reads the statistics of the stage, and one lane of each of
  // the four warps of the other warpgroup.
  static constexpr int kEmptyArrivals = kConsumerThreads / 2 + 4;
  static constexpr int kKeys = kTile.keys;
  static_assert(kQueries == 64 && kKeys % 16 == 0);
  static constexpr int kStages = 2;
  static constexpr int kDoutStages = 1;

  using KTile = tile::SwizzledTile<kKeys, C::kHeadDim>;
  using VTile = tile::SwizzledTile<kKeys, C::kHeadDimV>;
  using QTile = tile::SwizzledTile<kQueries, C::kHeadDim>;
  using DoutTile = tile::SwizzledTile<kQueries, C::kHeadDimV>;
  using ScoreTile = tile::SwizzledTile<kKeys, kQueries>;  // P and dS, transposed
  static constexpr int kCluster = kTile.cluster_size;
  static constexpr int kScoreStages = kCluster == 1 ? 2 : 1;
  static_assert(kCluster == 1 || C::kHeadDim == 256);
  using PeerKTile = tile::SwizzledTile<kKeys, C::kHeadDim / 2>;
  static constexpr int kStatisticBytes = kQueries * 4;
  // Offsets in shared memory, in bytes.
  static constexpr int kK = 0;
  static constexpr int kV = kK + KTile::kBytes;
  static constexpr int kPeerK = kV + VTile::kBytes;
  static constexpr int kQ = kPeerK + (kCluster - 1) * PeerKTile::kBytes;
  static constexpr int kDout = kQ + kStages * QTile::kBytes;
  static constexpr int kP = kDout + kDoutStages * DoutTile::kBytes;
  static constexpr int kDs = kP + kScoreStages * ScoreTile::kBytes;
  static constexpr int kPeerDs = kDs + kScoreStages * ScoreTile::kBytes;
  static constexpr int kLse = kPeerDs + (kCluster - 1) * ScoreTile::kBytes;
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  static constexpr int kDescriptorStages = 1;
  static constexpr int kDescriptors = kDelta + kDoutStages * kStatisticBytes;
  static constexpr int kBarriers = kDescriptors + kDescriptorStages * int{sizeof(TileDescriptor)};
  static constexpr int kSharedBytes = kBarriers + BackwardBarriers::bytes(kDescriptorStages);
  static_assert(kSharedBytes <= 227 * 1024);

  // How many panels of 64 columns a warpgroup computes, and the first of them. If their number is
  // odd, one warpgroup has more of dK and the other more of dV and dQ, so that both need about as
  // many registers. In a cluster each of the four warpgroups has one panel of dQ.
  static constexpr int dk_panels(int warpgroup) { return (KTile::kPanels + 1 - warpgroup) / 2; }
  static constexpr int dv_panels(int warpgroup) { return (VTile::kPanels + warpgroup) / 2; }
  static constexpr int dq_panels(int warpgroup) { return (KTile::kPanels + warpgroup) / 2; }
  static constexpr int first_dk_panel(int warpgroup) { return warpgroup == 0 ? 0 : dk_panels(0); }
  static constexpr int first_dv_panel(int warpgroup) { return warpgroup == 0 ? 0 : dv_panels(0); }
  static constexpr int first_dq_panel(int warpgroup) { return warpgroup == 0 ? 0 : dq_panels(0); }
};

// Named barriers. Those of dQ exist once per warpgroup, which shares them with its reduction warp.
// kScoresIssued, kPStored, kDsStored, kPRead and kKeysRead order the two warpgroups of the backward
// by columns.
enum BackwardBarrier : int {
  kDqFull = 1,
  kDqEmpty = 3,
  kConsumers = 5,
  kScoresIssued = 6,
  kPStored = 7,
  kWarpgroupStored = 8,  // and 9: one per warpgroup
  kPRead = 10,
  kKvReady = 11,
  kDsStored = 12,
  kKeysRead = 13,  // and 14: by the other warpgroup
};
inline constexpr int kDqThreads = 128 + 32;

}  // namespace tilewise::cuda::wgmma
