// The dealing role of the forward: one warp finds the work of the block and writes it down for the
// others, ahead of them.
#pragma once

#include "cuda/common/report.h"
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

  // The first work, before the barrier of the block.
  TILEWISE_DEVICE void begin() {
    if (p_.order.table != nullptr) ptx::griddepcontrol_wait();
    index_ = work_of(turn_);
    has_rows_ = locate(shared_.work(0), index_);
  }

  TILEWISE_DEVICE void run() {
    typename Shared::WorkPlace place;
    // Who takes works from a common heap before he needs them keeps them from those who are idle:
    // with one more than now a block was done 64 us of 420 before another one.
    const uint32_t ahead = p_.tile_counter == nullptr ? Shared::kWorkSlots : 2;
#pragma unroll 1
    for (;;) {
      if (has_rows_) {
        if (ptx::lane_index() == 0) shared_.work_located(place.slot()).arrive();
        describe(shared_.work(place.slot()));
        if (writes_part()) shared_.work_full(place.slot()).arrive();
        place.next();
      }
      const typename Shared::WorkPlace before{place.count - ahead};
      shared_.work_free(before.slot()).wait(before.phase());
      index_ = following(index_, turn_);
      if (index_ >= end()) break;
      has_rows_ = locate(shared_.work(place.slot()), index_);
    }
    shared_.work_free(place.slot()).wait(place.phase() ^ 1);
    if (!writes_part()) return;
    Work& end = shared_.work(place.slot());
    if (ptx::lane_index() == 0) {
      end.rows.count = 0;
      shared_.work_located(place.slot()).arrive();
    }
    end.parts[ptx::lane_index()].what = Walk::end;
    shared_.work_full(place.slot()).arrive();
  }

 private:
  // A lane for each math warpgroup; lane 0 writes the rest, too.
  TILEWISE_DEVICE static bool writes_part() {
    return ptx::lane_index() < C::kForward.math_warpgroups;
  }

  // Works have all of their keys up to p_.num_tiles; from there on they are parts of shared ones,
  // two for each block.
  TILEWISE_DEVICE int32_t end() const {
    if (C::kGeneral || !p_.stream_k.any()) return p_.num_tiles;
    return p_.num_tiles + 2 * static_cast<int32_t>(ptx::grid_blocks());
  }
  TILEWISE_DEVICE StreamKTail::Share part_of(int32_t index) const {
    return p_.stream_k.share(static_cast<int32_t>(ptx::block_index()), (index - p_.num_tiles) % 2);
  }

  // In rounds: where a block stands.
  struct Turn {
    int32_t round;
    int32_t second;  // of a pair
  };

  // Every other round goes backwards: who had the longer work has the shorter one next.
  TILEWISE_DEVICE int32_t work_of(Turn turn) const {
    const auto grid = static_cast<int32_t>(ptx::grid_blocks());
    const auto block = static_cast<int32_t>(ptx::block_index());
    const int32_t at = turn.round * grid + (turn.round % 2 == 0 ? block : grid - 1 - block);
    if (!C::kGeneral && at >= p_.num_tiles && p_.stream_k.any())
      return at < end() ? p_.num_tiles + 2 * block + (at - p_.num_tiles >= grid ? 1 : 0) : at;
    const int32_t pairs = p_.order.paired_tiles / 2;
    return at < pairs ? 2 * at + turn.second : at + pairs;
  }

  // Works that differ in length are taken by who is done, but where the order deals with it; the
  // counter is zeroed by the kernel before this one.
  TILEWISE_DEVICE int32_t following(int32_t index, Turn& turn) const {
    if (p_.tile_counter == nullptr) {
      turn.second = index < p_.order.paired_tiles ? turn.second ^ 1 : 0;
      if (turn.second == 0) ++turn.round;
      return work_of(turn);
    }
    ptx::griddepcontrol_wait();
    int32_t taken = 0;
    if (ptx::lane_index() == 0) taken = ptx::atom_add(p_.tile_counter, 1);
    return uniform(taken) + static_cast<int32_t>(ptx::grid_blocks());
  }

  // What the loading warp takes; whether the work has rows. Piece by piece: a lane of this warp has
  // few registers.
  TILEWISE_DEVICE bool locate(Work& work, int32_t index) const {
    const bool writes = ptx::lane_index() == 0;
    const bool shared = !C::kGeneral && index >= p_.num_tiles;
    if (shared && part_of(index).empty()) return false;
    const TileOrder::WorkTile at = p_.order.at(shared ? p_.num_tiles + part_of(index).tile : index);
    if (at.sequence < 0) return false;
    if (writes) {
      work.split = at.split;
      work.index = index;
    }
    ptx::sync_warp();
    if (writes) work.sequence = sequence_of(p_, at.sequence);
    ptx::sync_warp();
    if (writes) {
      work.rows = QueryRows::of(p_, work.sequence.band, at.tile, at.head);
      work.splits = C::kGeneral ? p_.splits_of(work.sequence.band) : shared ? 2 : 1;
      if (work.split >= work.splits) work.rows.count = 0;
    }
    ptx::sync_warp();
    if (work.rows.count == 0) return false;
    if (writes) {
      work.tiles = KeyTiles::of(work.sequence.band, work.rows, work.split,
                                C::kGeneral ? work.splits : 1, C::kForward.keys);
      if (shared) {
        const StreamKTail::Share part = part_of(index);
        work.tiles.first = part.begin;
        work.tiles.last = part.end - 1;
        work.split = StreamKTail::result_index(static_cast<int32_t>(ptx::block_index()), part.tile);
      }
    }
    ptx::sync_warp();
    return true;
  }

  // The rest, which the math warps take.
  TILEWISE_DEVICE void describe(Work& work) const {
    const int lane = ptx::lane_index();
    find_faults(work);
    if (writes_part()) work.parts[lane] = WarpgroupTiles::of(work, lane, C::kForward.keys);
    if (lane != 0) return;
    const Problem& p = p_.problem;
    work.out = static_cast<char*>(p.out.data) + work.offset_unpacked(p.out, 0) * C::Element::kBytes;
    const int64_t row = work.sequence.lse_offset(p.lse_stride_batch, work.rows.first);
    work.lse = work.rows.first_head * p.lse_stride_head + row;
  }

  // Math warps ask when they are done.
  TILEWISE_DEVICE void find_faults(Work& work) const {
    bool fits = work.sequence.fits;
    Range entries;
    if constexpr (C::kGeneral) {
      entries = work.pages(p_, C::kForward.keys);
      fits = fits && pages_fit(work.sequence, entries);
    }
    if (fits || ptx::lane_index() != 0) [[likely]]
      return;
    work.sequence.fits = false;
    report_sequence(p_.index_record, p_.problem, work.sequence, entries);
  }

  const TmaForwardParams& p_;
  Shared shared_;
  Turn turn_{0, 0};
  int32_t index_ = 0;
  bool has_rows_ = false;
};

}  // namespace tilewise::cuda::wgmma
