// The steps of a work tile of the backward by keys, as each role walks them: all row tiles that the
// band lets see the keys, or in the masked form those that the mask shows as well.
#pragma once

#include "cuda/wgmma/backward_mask.h"
#include "cuda/wgmma/backward_tile.h"
#include "cuda/wgmma/mask_shared.h"

namespace tilewise::cuda::wgmma {

// The row tiles of a window: tile `tile` + i of head `head` of the group has bit i. Tiles are
// counted from the first one of the work tile.
struct RowWindow {
  int32_t tile = 0;
  int32_t head = 0;

  TILEWISE_DEVICE void read(ptx::SharedAddress from) {
    tile = static_cast<int32_t>(ptx::ld_shared_b32(from));
    head = static_cast<int32_t>(ptx::ld_shared_b32(from + 12));
  }
  TILEWISE_DEVICE void write(ptx::SharedAddress to) const {
    ptx::st_shared_b32(to, static_cast<uint32_t>(tile));
    ptx::st_shared_b32(to + 12, static_cast<uint32_t>(head));
  }
};

// For consumers, which do not need to know which rows they compute.
struct AnyRows {
  TILEWISE_DEVICE void read(ptx::SharedAddress) {}
};

// The walk of the producer and of a reduction warp over the steps of one work tile after the other.
template <class C, bool = C::kMasked>
struct RowSteps {
  TILEWISE_DEVICE explicit RowSteps(ptx::SharedAddress) {}

  // Whether there is a step after the first `step` ones.
  TILEWISE_DEVICE bool more(int32_t step, int32_t steps) const { return step < steps; }
  // Moves `walk` to the next step.
  TILEWISE_DEVICE void begin(RowWalk&) const {}
  TILEWISE_DEVICE void end(RowWalk& walk) const { walk.advance(BackwardPlan<C>::kQueries); }
  // The number of steps, when `step` were walked and there are no more.
  TILEWISE_DEVICE int32_t count(int32_t, const TileDescriptor& work_tile) const {
    return work_tile.steps;
  }
};

template <class C>
class RowSteps<C, true> {
  using Plan = BackwardPlan<C>;

 public:
  TILEWISE_DEVICE explicit RowSteps(ptx::SharedAddress shared) : visible_({shared}) {}

  TILEWISE_DEVICE bool more(int32_t, int32_t) { return visible_.any(); }
  TILEWISE_DEVICE void begin(RowWalk& walk) {
    const int32_t bit = visible_.take() - 1;
    walk.move_to(visible_.place().head, visible_.place().tile + bit, Plan::kQueries);
  }
  TILEWISE_DEVICE void end(RowWalk&) const {}
  TILEWISE_DEVICE int32_t count(int32_t step, const TileDescriptor&) const { return step; }

 private:
  VisibleTiles<typename Plan::MaskRegion, RowWindow> visible_;
};

// The walk of a consumer warp, and the scores that are hidden in its steps.
template <class C, bool = C::kMasked>
struct ConsumerSteps {
  TILEWISE_DEVICE explicit ConsumerSteps(ptx::SharedAddress) {}

  // Begins a work tile. The result is positive if it has a step.
  TILEWISE_DEVICE int32_t start(const TileDescriptor& work_tile) const { return work_tile.steps; }
  TILEWISE_DEVICE bool more(int32_t step, int32_t end) const { return step < end; }
  TILEWISE_DEVICE void begin() const {}
  TILEWISE_DEVICE void next() const {}
  // The end of the steps, when there are no more from `step` on.
  TILEWISE_DEVICE int32_t end_of(int32_t, int32_t end) const { return end; }
  TILEWISE_DEVICE int32_t count(int32_t, const TileDescriptor& work_tile) const {
    return work_tile.steps;
  }
  TILEWISE_DEVICE KeyMask<C> mask(const TileDescriptor& work_tile, int thread_key) const {
    return KeyMask<C>(work_tile, thread_key);
  }
};

template <class C>
class ConsumerSteps<C, true> {
  using MaskRegion = typename BackwardPlan<C>::MaskRegion;

 public:
  TILEWISE_DEVICE explicit ConsumerSteps(ptx::SharedAddress shared)
      : visible_({shared}), hidden_({shared}) {}

  TILEWISE_DEVICE int32_t start(const TileDescriptor&) {
    next();
    return more_ ? 1 : 0;
  }
  TILEWISE_DEVICE bool more(int32_t, int32_t) const { return more_; }
  TILEWISE_DEVICE void begin() {
    is_full_ = visible_.next_is_full();
    visible_.take();
  }
  TILEWISE_DEVICE void next() { more_ = visible_.any(); }
  TILEWISE_DEVICE int32_t end_of(int32_t step, int32_t) const { return step; }
  TILEWISE_DEVICE int32_t count(int32_t walked, const TileDescriptor&) const { return walked; }

  // The bits of the mask in place of a KeyMask.
  struct BitMask {
    ConsumerSteps& steps;
    int key;  // of the thread, in the CTA

    TILEWISE_DEVICE bool touches(int32_t) const { return !steps.is_full_; }
    TILEWISE_DEVICE void apply(ScoreSums<C>& s, int32_t, float hidden) const {
      steps.hidden_.hide([&](int n, int i) -> float& { return s[4 * n + i]; }, key,
                         ptx::lane_index() % 4 * 2, hidden);
    }
  };
  TILEWISE_DEVICE BitMask mask(const TileDescriptor&, int thread_key) {
    return {*this, thread_key};
  }

 private:
  VisibleTiles<MaskRegion, AnyRows> visible_;
  HiddenScores<MaskRegion> hidden_;
  bool more_ = false;
  bool is_full_ = false;
};

}  // namespace tilewise::cuda::wgmma
