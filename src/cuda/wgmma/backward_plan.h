// How a backward block of head dims up to 128 is cut: what lies where in shared memory, and who
// waits for whom.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/wgmma/backward_sums.h"

namespace tilewise::cuda::wgmma {

template <class C>
struct BackwardPlan : BackwardSums<C> {
  using Sums = BackwardSums<C>;
  using Sums::kQueries;
  static constexpr arch::WgmmaBackwardTile kTile = C::kBackward;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kMathThreads = 256;
  static constexpr int kKeys = kTile.keys;
  static_assert(kKeys == 128 && max(C::kHeadDim, C::kHeadDimV) <= 128);

  // Shared memory. Q, dO, dS and the statistics have two stages.
  static constexpr int kStages = 2;
  using KTile = tile::SwizzledTile<kKeys, C::kHeadDim>;
  using VTile = tile::SwizzledTile<kKeys, C::kHeadDimV>;
  using QTile = tile::SwizzledTile<kQueries, C::kHeadDim>;
  using DoutTile = tile::SwizzledTile<kQueries, C::kHeadDimV>;
  using DsTile = tile::SwizzledTile<kQueries, kKeys>;
  static constexpr int kStatisticBytes = kQueries * 4;
  static constexpr int kK = 0;
  static constexpr int kV = kK + KTile::kBytes;
  static constexpr int kQ = kV + VTile::kBytes;
  static constexpr int kDout = kQ + kStages * QTile::kBytes;
  static constexpr int kDs = kDout + kStages * DoutTile::kBytes;
  static constexpr int kDq = kDs + kStages * DsTile::kBytes;
  static constexpr int kLse = kDq + kQueries * C::kHeadDim * 4;
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatisticBytes;
  static constexpr int kSharedBytes = kBarriers + 11 * 8;
  static_assert(kSharedBytes <= 227 * 1024);
};

// The barriers of a block, named for the fact that becomes true. One per stage where a stage is
// asked for.
template <class C>
struct BackwardBarriers {
  ptx::SharedAddress base;

  TILEWISE_DEVICE ptx::SharedAddress k_landed() const { return base; }
  TILEWISE_DEVICE ptx::SharedAddress v_landed() const { return base + 8; }
  TILEWISE_DEVICE ptx::SharedAddress tail_landed() const { return base + 16; }
  TILEWISE_DEVICE ptx::SharedAddress q_landed(int stage) const { return at(3, stage); }
  TILEWISE_DEVICE ptx::SharedAddress q_read(int stage) const { return at(5, stage); }
  TILEWISE_DEVICE ptx::SharedAddress dout_landed(int stage) const { return at(7, stage); }
  TILEWISE_DEVICE ptx::SharedAddress dout_read(int stage) const { return at(9, stage); }

  // By one thread; a barrier of the block follows.
  TILEWISE_DEVICE void init() const {
    constexpr int kMathWarps = BackwardPlan<C>::kMathThreads / ptx::kWarpSize;
    for (int i = 0; i < 3; ++i) ptx::mbarrier_init(base + static_cast<uint32_t>(i * 8), 1);
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(q_landed(stage), 1);
      ptx::mbarrier_init(dout_landed(stage), 1);
      ptx::mbarrier_init(q_read(stage), kMathWarps);
      ptx::mbarrier_init(dout_read(stage), kMathWarps);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int first, int stage) const {
    return base + static_cast<uint32_t>((first + stage) * 8);
  }
};

// Named barriers; those of dQ are one per warpgroup, shared with the warp that sends its sums.
enum BackwardBarrier : int { kDqStaged = 1, kDqTaken = 3, kMath = 5 };
inline constexpr int kDqThreads = 128 + 32;

}  // namespace tilewise::cuda::wgmma
