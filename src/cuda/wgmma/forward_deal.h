// The dealing role of the forward: one warp finds the work of the block and writes it down for the
// others, ahead of them.
#pragma once

#include "cuda/ptx/global.h"
#include "cuda/wgmma/forward_shared.h"

namespace tilewise::cuda::wgmma {

template <class C>
class ForwardDeal {
 public:
  using Shared = ForwardShared<C>;
  using Work = typename Shared::Work;

  TILEWISE_DEVICE ForwardDeal(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  TILEWISE_DEVICE void run() const {
    if (p_.order.table != nullptr) ptx::griddepcontrol_wait();
    int32_t index = static_cast<int32_t>(ptx::block_index()) * (in_pairs() ? 2 : 1);
    typename Shared::WorkPlace place;
    // Who takes works from a common heap before he needs them keeps them from those who are idle:
    // with one more than now a block was done 64 us of 420 before another one.
    const uint32_t ahead = p_.counter == nullptr ? Shared::kWorkSlots : 2;
#pragma unroll 1
    while (index < p_.work) {
      if (describe(shared_.work(place.slot()), index)) {
        if (writes_part()) shared_.work_full(place.slot()).arrive();
        place.next();
      }
      const typename Shared::WorkPlace before{place.count - ahead};
      shared_.work_free(before.slot()).wait(before.phase());
      index = following(index);
    }
    shared_.work_free(place.slot()).wait(place.phase() ^ 1);
    if (!writes_part()) return;
    Work& end = shared_.work(place.slot());
    if (ptx::lane_index() == 0) end.rows.count = 0;
    end.parts[ptx::lane_index()].what = Walk::end;
    shared_.work_full(place.slot()).arrive();
  }

 private:
  // A lane for each math warpgroup; lane 0 writes the rest, too.
  TILEWISE_DEVICE static bool writes_part() {
    return ptx::lane_index() < C::kForward.math_warpgroups;
  }

  TILEWISE_DEVICE bool in_pairs() const {
    return p_.order.longest_first == TileOrder::kAlternating;
  }

  // Works of one length: rounds of a grid, every other one backwards; alternating ones two by two.
  // Otherwise who is done takes the next one; the counter is zeroed by the kernel before this one.
  TILEWISE_DEVICE int32_t following(int32_t index) const {
    const auto grid = static_cast<int32_t>(ptx::grid_blocks());
    if (in_pairs()) return index % 2 == 0 ? index + 1 : index - 1 + 2 * grid;
    if (p_.counter == nullptr) return 2 * (index / grid + 1) * grid - 1 - index;
    ptx::griddepcontrol_wait();
    int32_t taken = 0;
    if (ptx::lane_index() == 0) taken = ptx::atom_add(p_.counter, 1);
    return uniform(taken) + grid;
  }

  // Whether the work has rows. Piece by piece: a lane of this warp has few registers.
  TILEWISE_DEVICE bool describe(Work& work, int32_t index) const {
    const bool writes = ptx::lane_index() == 0;
    if (p_.flags.data != nullptr && writes) p_.flags.data[index] = 0;
    const TileOrder::Work at = p_.order.at(index);
    if (at.sequence < 0) return false;
    if (writes) {
      work.split = at.split;
      work.index = index;
    }
    ptx::sync_warp();
    if (writes) {
      work.sequence = p_.shape_says_all ? sequence_of_shape(p_.problem, at.sequence)
                                        : sequence_of(p_.problem, at.sequence);
    }
    ptx::sync_warp();
    if (writes) {
      work.rows = QueryRows::of(p_, work.sequence.band, at.tile, at.head);
      work.splits = C::kGeneral ? p_.splits_of(work.sequence.band) : 1;
      if (work.split >= work.splits) work.rows.count = 0;
    }
    ptx::sync_warp();
    if (work.rows.count == 0) return false;
    if (writes) {
      const Problem& p = p_.problem;
      work.out =
          static_cast<char*>(p.out.data) + work.offset_unpacked(p.out, 0) * C::Element::kBytes;
      const int64_t row = work.sequence.lse_offset(p.lse_stride_batch, work.rows.first);
      work.lse =
          p.lse == nullptr ? nullptr : p.lse + work.rows.first_head * p.lse_stride_head + row;
    }
    ptx::sync_warp();
    if (writes) {
      work.tiles = KeyTiles::of(work.sequence.band, work.rows, work.split,
                                C::kGeneral ? work.splits : 1, C::kForward.keys);
    }
    ptx::sync_warp();
    const int warpgroup = ptx::lane_index();
    if (writes_part())
      work.parts[warpgroup] = WarpgroupTiles::of(work, warpgroup, C::kForward.keys);
    return true;
  }

  const TmaForwardParams& p_;
  Shared shared_;
};

}  // namespace tilewise::cuda::wgmma
