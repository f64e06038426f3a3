// The tile scheduler role of the forward: one warp finds the work tiles of its CTA and describes
// them to the other roles, up to four tiles ahead.
#pragma once

#include "cuda/common/report.h"
#include "cuda/ptx/global.h"
#include "cuda/wgmma/forward_shared.h"

namespace tilewise::cuda::wgmma {

template <class C>
class ForwardScheduler {
 public:
  using Shared = ForwardShared<C>;
  using WorkTile = typename Shared::WorkTile;

  TILEWISE_DEVICE ForwardScheduler(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  // Finds the first work tile, before the CTA's first barrier. The prepare kernel has written the
  // table and the copy of cu_seqlens_q.
  TILEWISE_DEVICE void begin() {
    // That of float8 has to wait for the transposed values as well.
    if (C::kFloat8 || p_.order.table != nullptr || p_.problem.cu_seqlens_q != nullptr)
      ptx::griddepcontrol_wait();
    if constexpr (C::kFloat8) keys_in_order_ = keys_are_in_order(p_.problem);
    index_ = tile_of(position_);
    has_rows_ = locate(shared_.work_tile(0), index_);
  }

  TILEWISE_DEVICE void run() {
    typename Shared::TilePipeline state;
    // Fetching tiles early from the shared counter starves idle CTAs: with one more tile ahead, one
    // CTA finished 64 us of 420 before another.
    const uint32_t ahead = p_.tile_counter == nullptr ? Shared::kTileStages : 2;
#pragma unroll 1
    for (;;) {
      if (has_rows_) {
        if (ptx::lane_index() == 0) shared_.tile_located(state.stage()).arrive();
        describe(shared_.work_tile(state.stage()));
        if (is_warpgroup_lane()) shared_.tile_full(state.stage()).arrive();
        state.next();
      }
      const typename Shared::TilePipeline before{state.count - ahead};
      shared_.tile_empty(before.stage()).wait(before.phase());
      index_ = next_index(index_, position_);
      if (index_ >= end()) break;
      has_rows_ = locate(shared_.work_tile(state.stage()), index_);
    }
    shared_.tile_empty(state.stage()).wait(state.phase() ^ 1);
    if (!is_warpgroup_lane()) return;
    WorkTile& end = shared_.work_tile(state.stage());
    if (ptx::lane_index() == 0) {
      end.rows.count = 0;
      shared_.tile_located(state.stage()).arrive();
    }
    end.warpgroup_tiles[ptx::lane_index()].kind = TileKind::end;
    shared_.tile_full(state.stage()).arrive();
  }

 private:
  // One lane per consumer warpgroup; lane 0 also writes the fields of the whole tile.
  TILEWISE_DEVICE static bool is_warpgroup_lane() {
    return ptx::lane_index() < C::kForward.consumer_warpgroups;
  }

  // Indices below p_.num_tiles are whole tiles; the indices after them are the shares of the
  // Stream-K tail, two per CTA.
  TILEWISE_DEVICE int32_t end() const {
    if (C::kGeneral || !p_.stream_k.any()) return p_.num_tiles;
    return p_.num_tiles + 2 * static_cast<int32_t>(ptx::grid_blocks());
  }
  TILEWISE_DEVICE StreamKTail::Share share_of(int32_t index) const {
    return p_.stream_k.share(static_cast<int32_t>(ptx::block_index()), (index - p_.num_tiles) % 2);
  }

  // Where a CTA is in the static schedule.
  struct Position {
    int32_t wave;
    int32_t second;  // 1: the second tile of a pair
  };

  // Every other wave runs backwards, so the CTA with the longer tile gets the shorter one next.
  TILEWISE_DEVICE int32_t tile_of(Position position) const {
    const auto grid = static_cast<int32_t>(ptx::grid_blocks());
    const auto block = static_cast<int32_t>(ptx::block_index());
    const int32_t at = position.wave * grid + (position.wave % 2 == 0 ? block : grid - 1 - block);
    if (!C::kGeneral && at >= p_.num_tiles && p_.stream_k.any())
      return at < end() ? p_.num_tiles + 2 * block + (at - p_.num_tiles >= grid ? 1 : 0) : at;
    const int32_t pairs = p_.order.paired_tiles / 2;
    return at < pairs ? 2 * at + position.second : at + pairs;
  }

  // Tiles of unequal length are scheduled dynamically unless the static order balances them. The
  // previous kernel has zeroed the counter.
  TILEWISE_DEVICE int32_t next_index(int32_t index, Position& position) const {
    if (p_.tile_counter == nullptr) {
      position.second = index < p_.order.paired_tiles ? position.second ^ 1 : 0;
      if (position.second == 0) ++position.wave;
      return tile_of(position);
    }
    ptx::griddepcontrol_wait();
    int32_t taken = 0;
    if (ptx::lane_index() == 0) taken = ptx::atom_add(p_.tile_counter, 1);
    return ptx::uniform(taken) + static_cast<int32_t>(ptx::grid_blocks());
  }

  // Writes what the producer needs and returns whether the tile has rows. It writes field by field
  // because a lane of this warp has few registers.
  TILEWISE_DEVICE bool locate(WorkTile& work_tile, int32_t index) const {
    const bool writes = ptx::lane_index() == 0;
    const bool is_share = !C::kGeneral && index >= p_.num_tiles;
    if (is_share && share_of(index).empty()) return false;
    const TileOrder::WorkTile at =
        p_.order.at(is_share ? p_.num_tiles + share_of(index).tile : index);
    if (at.sequence < 0) return false;
    if (writes) {
      work_tile.split = at.split;
      work_tile.index = index;
    }
    ptx::sync_warp();
    if (writes) work_tile.sequence = sequence_of(p_, at.sequence);
    ptx::sync_warp();
    if (writes) {
      work_tile.rows = QueryRows::of(p_, work_tile.sequence.band, at.tile, at.head);
      work_tile.splits = C::kGeneral ? p_.splits_of(work_tile.sequence.band) : is_share ? 2 : 1;
      if (work_tile.split >= work_tile.splits) work_tile.rows.count = 0;
    }
    ptx::sync_warp();
    if (work_tile.rows.count == 0) return false;
    if (writes) {
      work_tile.tiles = KeyTiles::of(work_tile.sequence.band, work_tile.rows, work_tile.split,
                                     C::kGeneral ? work_tile.splits : 1, C::kForward.keys);
      if (is_share) {
        const StreamKTail::Share share = share_of(index);
        work_tile.tiles.first = share.begin;
        work_tile.tiles.last = share.end - 1;
        work_tile.split =
            StreamKTail::result_index(static_cast<int32_t>(ptx::block_index()), share.tile);
      }
    }
    ptx::sync_warp();
    return true;
  }

  // Writes the rest, which the consumers need.
  TILEWISE_DEVICE void describe(WorkTile& work_tile) const {
    const int lane = ptx::lane_index();
    check_indices(work_tile);
    if (is_warpgroup_lane())
      work_tile.warpgroup_tiles[lane] = WarpgroupTiles::of(work_tile, lane, C::kForward.keys);
    if (lane != 0) return;
    const Problem& p = p_.problem;
    work_tile.out =
        static_cast<char*>(p.out.data) + work_tile.offset_unpacked(p.out, 0) * C::Out::kBytes;
    const int64_t row = work_tile.sequence.lse_offset(p.lse_stride_batch, work_tile.rows.first);
    work_tile.lse = work_tile.rows.first_head * p.lse_stride_head + row;
    if constexpr (C::kFloat8)
      work_tile.set_factors(p, work_tile.sequence.batch,
                            p_.group.quotient(work_tile.rows.first_head));
  }

  // Whether no sequence begins before another one of a lower index. Sequences out of order would
  // share tiles of transposed values (TransposedValues::first_tile).
  TILEWISE_DEVICE static bool keys_are_in_order(const Problem& p) {
    if (p.cu_seqlens_k == nullptr) return true;
    bool falls = false;
    for (int64_t b = ptx::lane_index(); b < p.batch; b += ptx::kWarpSize)
      falls |= p.cu_seqlens_k[b + 1] < p.cu_seqlens_k[b];
    return !ptx::any(falls);
  }

  // Reports index arrays that do not fit. The consumers read `fits` only when they finish the tile.
  // Where the keys are not in order, the sequences that do not fit are reported, and all are lost.
  TILEWISE_DEVICE void check_indices(WorkTile& work_tile) const {
    bool fits = work_tile.sequence.fits;
    Range entries;
    if constexpr (C::kGeneral) {
      entries = work_tile.pages(p_, C::kForward.keys);
      fits = fits && pages_fit(work_tile.sequence, entries);
    }
    const bool lost = C::kFloat8 && !keys_in_order_;
    if ((fits && !lost) || ptx::lane_index() != 0) [[likely]]
      return;
    work_tile.sequence.fits = false;
    if (C::kFloat8 && fits) return;
    report_sequence(p_.index_record, p_.problem, work_tile.sequence, entries);
  }

  const TmaForwardParams& p_;
  Shared shared_;
  Position position_{0, 0};
  int32_t index_ = 0;
  bool has_rows_ = false;
  bool keys_in_order_ = true;  // of float8
};

}  // namespace tilewise::cuda::wgmma
