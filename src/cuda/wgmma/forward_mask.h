// The mask of the forward's masked form. Two warps read it and find out, ahead of the roles that
// need it, which key tiles of a work tile are visible, and which scores of those are hidden.
//
// They describe the key tiles from the last one to the first. The producer loads the visible tiles,
// and the consumers compute them in the same order; full tiles need no test per score. Bits and
// windows (mask_shared.h) describe what mask, band and lengths show together, so the consumers know
// only them.
#pragma once

#include "cuda/common/forward_score_mod.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/forward_shared.h"
#include "cuda/wgmma/mask_range.h"

namespace tilewise::cuda::wgmma {

// The key tiles of a window: tile end - i has bit i, counted from 1.
struct KeyWindow {
  int32_t end = 0;

  TILEWISE_DEVICE void read(ptx::SharedAddress from) {
    end = ptx::uniform(static_cast<int32_t>(ptx::ld_shared_b32(from)));
  }
  TILEWISE_DEVICE void write(ptx::SharedAddress to) const {
    ptx::st_shared_b32(to, static_cast<uint32_t>(end));
  }
};

// The visible key tiles of one work tile after the other.
template <class C>
struct VisibleKeys : VisibleTiles<typename ForwardShared<C>::MaskRegion, KeyWindow> {
  using Tiles = VisibleTiles<typename ForwardShared<C>::MaskRegion, KeyWindow>;

  TILEWISE_DEVICE explicit VisibleKeys(const ForwardShared<C>& shared)
      : Tiles(shared.mask_region()) {}

  // The next tile, which there must be.
  TILEWISE_DEVICE int32_t take() { return Tiles::place().end - Tiles::take(); }
};

// The mask as a consumer warp sees it; empty in the other forms.
template <class C, bool = C::kMasked>
struct ForwardMask {
  TILEWISE_DEVICE explicit ForwardMask(const ForwardShared<C>&) {}
};
template <class C>
struct ForwardMask<C, true> {
  VisibleKeys<C> tiles;
  HiddenScores<typename ForwardShared<C>::MaskRegion> bits;

  TILEWISE_DEVICE explicit ForwardMask(const ForwardShared<C>& shared)
      : tiles(shared), bits(shared.mask_region()) {}

  // The kind of the next work tile, which has `kind` before the mask is looked at.
  TILEWISE_DEVICE TileKind kind_of(TileKind kind) {
    if (kind == TileKind::end) return kind;
    return tiles.any() ? TileKind::keys : TileKind::no_keys;
  }

  // Hidden scores of the next tile that is not full become -inf.
  TILEWISE_DEVICE void hide(tile::Sums<1, C::kForward.keys / 8>& s, const LanePosition& position) {
    bits.hide([&](int n, int i) -> float& { return s.x[0][n][i]; }, position.row0, position.column,
              kMinusInfinity);
  }
};

// The role of the mask warps. Both find the windows, one of them publishes these, and each writes
// the bits of half of the rows.
template <class C>
class ForwardMaskReader : NearRanges<ForwardMaskReader<C>> {
  using Ranges = NearRanges<ForwardMaskReader<C>>;
  using Shared = ForwardShared<C>;
  using MaskRegion = typename Shared::MaskRegion;
  using WorkTile = typename Shared::WorkTile;
  friend Ranges;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kRowsAtOnce = Shared::kMaskWarps * ptx::kWarpSize;
  static constexpr int kPasses = C::kForward.rows() / kRowsAtOnce;
  static constexpr int kWords = MaskRegion::kWords;

 public:
  TILEWISE_DEVICE ForwardMaskReader(const TmaForwardParams& params, const Shared& shared, int warp)
      : p_(params),
        shared_(shared),
        warp_(warp),
        mask_(shared.mask(warp)),
        writer_(shared.mask_region()) {}

  TILEWISE_DEVICE void run() {
    typename Shared::TilePipeline state;
#pragma unroll 1
    for (;; state.next()) {
      shared_.tile_located(state.stage()).wait(state.phase());
      work_tile_ = &shared_.work_tile(state.stage());
      if (rows() == 0) break;
      if (tiles().first <= tiles().last) find_windows();
      publish(0, 0, 0);
      ptx::sync_warp();
      if (ptx::lane_index() == 0) shared_.tile_empty(state.stage()).arrive();
    }
  }

 private:
  // The work tile, read again at each use, because a lane of this warp has few registers.
  TILEWISE_DEVICE int32_t rows() const { return work_tile_->rows.count; }
  TILEWISE_DEVICE int64_t first_row() const { return work_tile_->rows.first; }
  TILEWISE_DEVICE int64_t head() const { return work_tile_->rows.first_head; }
  TILEWISE_DEVICE const KeyTiles& tiles() const { return work_tile_->tiles; }

  TILEWISE_DEVICE const Mask& mask() const { return mask_.mask; }
  TILEWISE_DEVICE NearRange near(const MaskRange& range) const {
    return NearRange::of(range, first_row());
  }

  TILEWISE_DEVICE Range all_rows() const { return {first_row(), first_row() + rows()}; }
  TILEWISE_DEVICE int32_t end_key(int32_t end) const { return min(tiles().keys, end * kKeys); }
  TILEWISE_DEVICE Range keys_of(int32_t begin, int32_t end) const {
    return {int64_t{begin} * kKeys, end_key(end)};
  }

  TILEWISE_DEVICE void find_windows() {
    const Range keys = keys_of(tiles().first, tiles().last + 1);
    ptx::sync_warp();  // the mask of the work tile before has been read
    mask_.set(p_.mask, work_tile_->sequence.batch, {head(), head() + 1}, all_rows(), keys);
    ptx::sync_warp();
    if (mask().is_ranges())
      Ranges::load_ranges();
    else
      seen_ = intersect(keys, mask_.keys_of_any(all_rows()));
    int32_t end = tiles().last + 1;
#pragma unroll 1
    while ((end = end_of_seen(end)) > tiles().first) {
      find_window(end);
      end -= kWindowTiles;
    }
  }

  // The end of the last tile before tile `end` of which the rows may see something; 0: there is
  // none.
  TILEWISE_DEVICE int32_t end_of_seen(int32_t end) const {
    if (end <= tiles().first) return 0;
    const KeyRun walked = {tiles().first * kKeys, end_key(end)};
    uint32_t last = 0;
    if (mask().is_ranges()) {
      Ranges::for_chunks([&](const NearRange& own) {
        const KeyRun seen = own.keys_of_any(rows(), walked);
        if (seen.begin < seen.end) last = max(last, static_cast<uint32_t>(seen.end));
      });
      last = ptx::highest(last);
    } else if (seen_.begin < walked.end && !seen_.empty()) {
      last = static_cast<uint32_t>(min(seen_.end, int64_t{walked.end}));
    }
    return static_cast<int32_t>((last + kKeys - 1) / kKeys);
  }

  // The tiles from `end` down, as many as a window has. One tile per lane.
  TILEWISE_DEVICE void find_window(int32_t end) {
    const int32_t tile = end - 1 - ptx::lane_index();
    Coverage coverage = Coverage::none;
    if (mask().is_ranges())
      coverage = coverage_in_window({tile * kKeys, end_key(tile + 1)});
    else if (tile >= tiles().first)
      coverage = mask().coverage(mask_.heads, all_rows(), keys_of(tile, tile + 1));
    if (tile < tiles().first) coverage = Coverage::none;
    const uint32_t visible = ptx::ballot(coverage != Coverage::none);
    KeyTiles by_band = tiles();
    by_band.find_full(work_tile_->rows, kKeys);
    const uint32_t full = ptx::ballot(coverage == Coverage::full && !by_band.masked(tile));
    if (visible == 0) return;
    publish(end, visible, full);
#pragma unroll 1
    for (uint32_t left = visible & ~full; left != 0; left &= left - 1)
      write_bits((end - ptx::bit_width(left & (~left + 1))) * kKeys);
  }

  // The coverage of the keys of the lane's tile; lane 0 has the last tile of the window.
  TILEWISE_DEVICE Coverage coverage_in_window(const KeyRun& keys) const {
    const KeyRun window = {
        static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.begin), 31)),
        static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.end), 0))};
    return Ranges::coverage_by_ranges(keys, window);
  }

  TILEWISE_DEVICE void publish(int32_t end, uint32_t visible, uint32_t full) {
    if (warp_ == 0) writer_.publish(KeyWindow{end}, visible, full);
  }

  // Writes what each row sees of the tile that begins at `key`. Rows past the last one repeat it.
  TILEWISE_DEVICE void write_bits(int32_t key) {
    const int stage = writer_.begin_bits();
    if (mask().is_ranges()) {
      uint32_t words[kPasses][kWords] = {};
      Ranges::add_bits_of_ranges(words, key, [&](int pass) { return row(pass); });
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) store_bits(stage, pass, key, words[pass]);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        uint32_t words[kWords] = {};
        mask().add_bits(head(), first_row() + row(pass),
                        MaskBits{words, 1, {key, int64_t{key} + kKeys}});
        store_bits(stage, pass, key, words);
      }
    }
    writer_.end_bits();
  }

  // Stores the bits of a row without those that the band hides.
  TILEWISE_DEVICE void store_bits(int stage, int pass, int32_t key,
                                  const uint32_t (&words)[kWords]) const {
    const KeyRun band = {max(0, tiles().lower + row(pass)),
                         min(tiles().keys, tiles().upper + row(pass))};
    const ptx::SharedAddress to = shared_.mask_region().bits(stage, row_of_lane(pass));
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      ptx::st_shared_b32(to + static_cast<uint32_t>(w) * 4, words[w] & band.bits(key, w));
  }

  TILEWISE_DEVICE int32_t row_of_lane(int pass) const {
    return pass * kRowsAtOnce + warp_ * ptx::kWarpSize + ptx::lane_index();
  }
  TILEWISE_DEVICE int32_t row(int pass) const { return min(row_of_lane(pass), rows() - 1); }

  const TmaForwardParams& p_;
  Shared shared_;
  const int warp_;
  common::CtaMask& mask_;
  const WorkTile* work_tile_ = nullptr;
  Range seen_;  // blocks: the hull of the keys
  MaskWriter<MaskRegion> writer_;
};

}  // namespace tilewise::cuda::wgmma
