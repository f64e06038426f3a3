// Shared memory of a forward block: tiles, barriers, the records of the work in flight and bias.
#pragma once

#include "cuda/arch/limits.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/wgmma/forward_work.h"

namespace tilewise::cuda::wgmma {

// Named for the fact that becomes true.
struct Barrier {
  ptx::SharedAddress address;

  TILEWISE_DEVICE void init(int arrivals) const { ptx::mbarrier_init(address, arrivals); }
  TILEWISE_DEVICE void arrive() const { ptx::mbarrier_arrive(address); }
  // Arrives, and the fact becomes true when so many bytes have landed.
  TILEWISE_DEVICE void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(address, bytes); }
  TILEWISE_DEVICE void wait(int parity) const { ptx::mbarrier_wait_parity(address, parity); }
};

// The fill `count` of a ring of kSlots slots: who fills it and who empties it count alike. Four
// rings in four registers: for the warps that load and deal.
template <int kSlots>
struct RingPlace {
  static_assert((kSlots & (kSlots - 1)) == 0);

  uint32_t count = 0;

  TILEWISE_DEVICE int slot() const { return static_cast<int>(count % kSlots); }
  TILEWISE_DEVICE int phase() const { return static_cast<int>(count / kSlots % 2); }
  TILEWISE_DEVICE void next() { ++count; }
};

// The same for math warps, whose next product waits for the address of a slot: nothing to compute.
template <int kSlots>
struct RingWalk {
  int at = 0;
  int parity = 0;

  TILEWISE_DEVICE int slot() const { return at; }
  TILEWISE_DEVICE int phase() const { return parity; }
  TILEWISE_DEVICE void next() {
    if (++at == kSlots) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <class C>
struct ForwardShared {
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  static constexpr int kMathWarps = 4 * kTile.math_warpgroups;
  // Works are found ahead: at least the next one while the sums of one are still being stored.
  static constexpr int kWorkSlots = 4;

  using Work = ForwardWork<C>;
  using QTile = tile::SwizzledTile<64, C::kHeadDim>;  // of a warpgroup
  using KTile = tile::SwizzledTile<kTile.keys, C::kHeadDim>;
  using VTile = tile::SwizzledTile<kTile.keys, C::kHeadDimV>;
  using QPlace = RingPlace<kTile.q_buffers>;
  using KvPlace = RingPlace<kTile.stages>;
  using WorkPlace = RingPlace<kWorkSlots>;

  static constexpr int kQBytes = kTile.math_warpgroups * QTile::kBytes;
  static constexpr int kKAt = kTile.q_buffers * kQBytes;
  static constexpr int kVAt = kKAt + kTile.stages * KTile::kBytes;
  static constexpr int kBarriersAt = kVAt + kTile.stages * VTile::kBytes;
  static constexpr int kBarriers = 2 * kTile.q_buffers + 4 * kTile.stages + 3 * kWorkSlots + 1;
  static constexpr int kWorkAt = round_up(kBarriersAt + 8 * kBarriers, 16);
  static constexpr int kWorkEnd = round_up(kWorkAt + kWorkSlots * sizeof(Work), 16);
  // Of a math warp: 16 bits for each of its rows and each key of a tile.
  static constexpr int kBiasBytes = arch::WgmmaForwardTile::kRowsOfWarp * kTile.keys * 2;
  static constexpr int kBiasAt = round_up(kWorkEnd, 128);
  static constexpr int kBiasEnd = kBiasAt + kMathWarps * kBiasBytes;
  // Where there is room: not at D192 with values of 128, nor at D256. They add it by elements.
  static constexpr bool kHasBias =
      C::kGeneral && kBiasEnd <= arch::limits_of(C::Arch::kTable / 10).shared_bytes;
  static constexpr int kBytes = kHasBias ? kBiasEnd : kWorkEnd;

  ptx::SharedAddress base;

  TILEWISE_DEVICE static ForwardShared of() { return {ptx::shared_address(ptx::shared_memory())}; }

  TILEWISE_DEVICE QTile q(int buffer, int warpgroup) const {
    return {at(buffer * kQBytes + warpgroup * QTile::kBytes)};
  }
  TILEWISE_DEVICE KTile k(int stage) const { return {at(kKAt + stage * KTile::kBytes)}; }
  TILEWISE_DEVICE VTile v(int stage) const { return {at(kVAt + stage * VTile::kBytes)}; }
  TILEWISE_DEVICE Work& work(int slot) const {
    return *reinterpret_cast<Work*>(ptx::shared_memory() + kWorkAt +
                                    slot * static_cast<int>(sizeof(Work)));
  }

  TILEWISE_DEVICE ptx::SharedAddress bias(int math_warp) const {
    return at(kBiasAt + math_warp * kBiasBytes);
  }

  TILEWISE_DEVICE Barrier k_full(int stage) const { return barrier(stage); }
  TILEWISE_DEVICE Barrier k_free(int stage) const { return barrier(kTile.stages + stage); }
  TILEWISE_DEVICE Barrier v_full(int stage) const { return barrier(2 * kTile.stages + stage); }
  TILEWISE_DEVICE Barrier v_free(int stage) const { return barrier(3 * kTile.stages + stage); }
  TILEWISE_DEVICE Barrier q_full(int buffer) const { return barrier(4 * kTile.stages + buffer); }
  TILEWISE_DEVICE Barrier q_free(int buffer) const { return q_full(kTile.q_buffers + buffer); }
  TILEWISE_DEVICE Barrier work_full(int slot) const { return q_full(2 * kTile.q_buffers + slot); }
  TILEWISE_DEVICE Barrier work_free(int slot) const { return work_full(kWorkSlots + slot); }
  // Before it is full: what is to be loaded.
  TILEWISE_DEVICE Barrier work_located(int slot) const { return work_free(kWorkSlots + slot); }
  // The last values of a sequence have landed, and with them rows that are not its own.
  TILEWISE_DEVICE Barrier v_landed() const { return work_located(kWorkSlots); }

  // By one thread; others see it after the barrier of the block.
  TILEWISE_DEVICE void init_barriers() const {
    for (int i = 0; i < kTile.stages; ++i) {
      k_full(i).init(1);
      k_free(i).init(kMathWarps);
      v_full(i).init(1);
      v_free(i).init(kMathWarps);
    }
    for (int i = 0; i < kTile.q_buffers; ++i) {
      q_full(i).init(1);
      q_free(i).init(kMathWarps);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      work_full(i).init(kTile.math_warpgroups);  // lanes of the dealing warp: who writes arrives
      work_free(i).init(kMathWarps + 1);         // and the loading warp
      work_located(i).init(1);
    }
    v_landed().init(1);
    ptx::fence_mbarrier_init();
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int bytes) const {
    return base + static_cast<uint32_t>(bytes);
  }
  TILEWISE_DEVICE Barrier barrier(int index) const { return {at(kBarriersAt + 8 * index)}; }
};

}  // namespace tilewise::cuda::wgmma
