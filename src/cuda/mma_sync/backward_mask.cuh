// The mask of the key tile of a backward CTA: which tiles of query rows it walks, and which pairs
// of such a tile it shows. It lies in shared memory behind the other tiles.
#pragma once

#include "cuda/common/tile_coverage.h"
#include "cuda/mma_sync/backward_plan.h"

namespace tilewise::cuda::mma_sync {

// The steps of the loop over row tiles are counted over the tiles of one query head of the group
// after the other, whether the mask shows something of them or not.
template <class C>
class MaskedRows {
  using Plan = BackwardPlan<C>;

 public:
  // All threads of the CTA call it. `first_head` is the first head of the group.
  TILEWISE_DEVICE void find(const BackwardParams& p, const Sequence& s, int64_t first_head,
                            int32_t group, Range row_tiles, Range keys) {
    const auto tiles = static_cast<int32_t>(row_tiles.size());
    const Tiling tiling{s.band.rows, Plan::kQueries};
    const Range rows = rows_of(tiling, row_tiles);
    if (ptx::warp_index() == 0)
      mask_.set(p.mask, s.batch, {first_head, first_head + group}, rows, keys);
    ptx::sync_block();
    const int32_t heads = mask_.mask.per_head() ? group : 1;
    if (ptx::thread_index() == 0) {
      tiles_ = tiles;
      steps_ = tiles * group;
      counted_ = tiles * heads;
    }
    coverage_.find(tiles * heads, Plan::kThreads, [&](int32_t begin, int32_t end) {
      // Deterministic sums wait for every key tile before this one, so no tile may be left out.
      const bool visits_all = p.dq_semaphores != nullptr;
      const int32_t head = begin / tiles;
      const int32_t last_head = (end - 1) / tiles;
      const int64_t first_tile = row_tiles.begin - int64_t{head} * tiles;
      const Range walked =
          head == last_head ? rows_of(tiling, {first_tile + begin, first_tile + end}) : rows;
      const Coverage coverage =
          mask_.mask.coverage({first_head + head, first_head + last_head + 1}, walked, keys);
      return visits_all && coverage == Coverage::none ? Coverage::partial : coverage;
    });
    ptx::sync_block();
  }

  // The number of visible steps.
  TILEWISE_DEVICE int32_t count() const {
    return counted_ == 0 ? 0 : coverage_.count(counted_) * (steps_ / counted_);
  }

  // The first visible step from `step` on, or a number past the last step.
  TILEWISE_DEVICE int32_t from(int32_t step) const {
    if (step >= steps_) return steps_;
    const int32_t head = first_step_of(step);
    const int32_t tile = coverage_.first_from(step - head, counted_);
    if (tile < counted_ || head + counted_ >= steps_) return head + tile;
    return head + counted_ + coverage_.first_from(0, counted_);
  }

  TILEWISE_DEVICE bool is_full(int32_t step) const {
    return coverage_.is_full(step - first_step_of(step));
  }

  TILEWISE_DEVICE bool has(int32_t step) const { return step < steps_; }
  TILEWISE_DEVICE int32_t head_of(int32_t step) const {
    return static_cast<int32_t>(static_cast<uint32_t>(step) / static_cast<uint32_t>(tiles_));
  }
  TILEWISE_DEVICE int32_t tiles_per_head() const { return tiles_; }

  // Bit i: whether the mask shows key `key` + i to the row. `key` is the first one of a warp.
  TILEWISE_DEVICE uint32_t shown(int64_t head, int64_t row, int64_t key) const {
    uint32_t bits = 0;
    mask_.mask.add_bits(head, row, MaskBits{&bits, 1, {key, key + kMaskWord}});
    return bits;
  }

 private:
  TILEWISE_DEVICE static Range rows_of(const Tiling& tiling, Range tiles) {
    return {tiles.begin * tiling.step, min(tiling.length, tiles.end * tiling.step)};
  }
  // The first step of the heads that the coverage counts together: all, or the one of the step.
  TILEWISE_DEVICE int32_t first_step_of(int32_t step) const {
    return static_cast<int32_t>(static_cast<uint32_t>(step) / static_cast<uint32_t>(counted_)) *
           counted_;
  }

  common::CtaMask mask_;
  common::TileCoverage coverage_;
  int32_t tiles_;    // per head
  int32_t steps_;    // over all heads of the group
  int32_t counted_;  // steps that the coverage counts: of one head or, with a mask per head, of all
};

// At an opaque address, which is computed at each use: the loop has no register to keep it in.
template <class C>
TILEWISE_DEVICE MaskedRows<C>& masked_rows() {
  return *reinterpret_cast<MaskedRows<C>*>(
      ptx::shared_memory() + ptx::opaque(static_cast<uint32_t>(BackwardPlan<C>::kMask)));
}

}  // namespace tilewise::cuda::mma_sync
