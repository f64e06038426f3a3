// The mask of the forward's masked form. Two warps read it and find out, ahead of the roles that
// need it, which key tiles of a work tile are visible, and which scores of those are hidden.
//
// They describe the key tiles of a work tile in windows of 32, from the last tile to the first: one
// bit says whether a tile is visible, another whether all of its pairs are. The producer loads the
// visible tiles, and the consumers compute them in the same order; full tiles need no test per
// score. For each other tile the warps write a bit per pair. Bits and windows describe what mask,
// band and lengths show together, so the consumers know only them.
#pragma once

#include "cuda/common/forward_score_mod.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/forward_shared.h"
#include "cuda/wgmma/mask_range.h"

namespace tilewise::cuda::wgmma {

// The visible key tiles of one work tile after the other. The roles that walk them keep their state
// in registers.
template <class C>
class VisibleTiles {
  using Shared = ForwardShared<C>;

 public:
  TILEWISE_DEVICE explicit VisibleTiles(const Shared& shared) : shared_(shared) {}

  // Whether the work tile has one more visible tile. When it returns false, the next call is about
  // the next work tile. A whole warp calls it.
  TILEWISE_DEVICE bool any() {
    if (visible_ == 0) read_window();
    return visible_ != 0;
  }

  // Whether the window has one more.
  TILEWISE_DEVICE bool in_window() const { return visible_ != 0; }

  // Whether all pairs of the next tile are visible; false if the window has no other tile.
  TILEWISE_DEVICE bool next_is_full() const { return (full_ & visible_ & (~visible_ + 1)) != 0; }

  // The next tile, which there must be.
  TILEWISE_DEVICE int32_t take() {
    const int32_t tile = end_ - ptx::bit_width(visible_ & (~visible_ + 1));
    visible_ &= visible_ - 1;
    return tile;
  }

 private:
  TILEWISE_DEVICE void read_window() {
    const int stage = state_.stage();
    shared_.window_full(stage).wait(state_.phase());
    const ptx::SharedAddress window = shared_.window(stage);
    end_ = uniform(static_cast<int32_t>(ptx::ld_shared_b32(window)));
    visible_ = static_cast<uint32_t>(uniform(static_cast<int32_t>(ptx::ld_shared_b32(window + 4))));
    full_ = static_cast<uint32_t>(uniform(static_cast<int32_t>(ptx::ld_shared_b32(window + 8))));
    ptx::sync_warp();
    if (ptx::lane_index() == 0) shared_.window_empty(stage).arrive();
    state_.next();
  }

  Shared shared_;
  typename Shared::WindowPipeline state_;
  int32_t end_ = 0;  // tile end_ - 1 - i has bit i
  uint32_t visible_ = 0;
  uint32_t full_ = 0;
};

// The bits of tiles that are not full, as a consumer warp reads them.
template <class C>
class HiddenScores {
  using Shared = ForwardShared<C>;
  static constexpr int kKeys = C::kForward.keys;

 public:
  TILEWISE_DEVICE explicit HiddenScores(const Shared& shared) : shared_(shared) {}

  // Hidden scores of the next such tile become -inf.
  TILEWISE_DEVICE void hide(tile::Sums<1, kKeys / 8>& s, const LanePosition& position) {
    constexpr int kColumns = static_cast<int>(kMaskWord) / 8;  // of 8 keys, per word
    const int stage = state_.stage();
    shared_.bits_full(stage).wait(state_.phase());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[Shared::kMaskWords];
      read(words, shared_.bits(stage, position.row(0, h)));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint32_t word = words[n / kColumns] >> position.column;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((word >> (n % kColumns * 8 + e) & 1u) == 0) s.x[0][n][2 * h + e] = kMinusInfinity;
        }
      }
    }
    ptx::sync_warp();
    if (ptx::lane_index() == 0) shared_.bits_empty(stage).arrive();
    state_.next();
  }

 private:
  TILEWISE_DEVICE static void read(uint32_t (&words)[2], ptx::SharedAddress from) {
    ptx::ld_shared_v2_b32(words, from);
  }
  TILEWISE_DEVICE static void read(uint32_t (&words)[4], ptx::SharedAddress from) {
    ptx::ld_shared_v4_b32(words, from);
  }

  Shared shared_;
  typename Shared::BitsPipeline state_;
};

// The mask as a consumer warp sees it; empty in the other forms.
template <class C, bool = C::kMasked>
struct ForwardMask {
  TILEWISE_DEVICE explicit ForwardMask(const ForwardShared<C>&) {}
};
template <class C>
struct ForwardMask<C, true> {
  VisibleTiles<C> tiles;
  HiddenScores<C> bits;

  TILEWISE_DEVICE explicit ForwardMask(const ForwardShared<C>& shared)
      : tiles(shared), bits(shared) {}

  // The kind of the next work tile, which has `kind` before the mask is looked at.
  TILEWISE_DEVICE TileKind kind_of(TileKind kind) {
    if (kind == TileKind::end) return kind;
    return tiles.any() ? TileKind::keys : TileKind::no_keys;
  }
};

// The role of the mask warps. Both find the windows, one of them publishes these, and each writes
// the bits of half of the rows.
template <class C>
class ForwardMaskReader {
  using Shared = ForwardShared<C>;
  using WorkTile = typename Shared::WorkTile;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kWindow = ptx::kWarpSize;  // key tiles
  static constexpr int kRowsAtOnce = Shared::kMaskWarps * ptx::kWarpSize;
  static constexpr int kPasses = C::kForward.rows() / kRowsAtOnce;
  static constexpr int kWords = Shared::kMaskWords;

 public:
  TILEWISE_DEVICE ForwardMaskReader(const TmaForwardParams& params, const Shared& shared, int warp)
      : p_(params), shared_(shared), warp_(warp), mask_(shared.mask(warp)) {}

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
    if (mask_.mask.is_ranges())
      near_ = near_range(0);
    else
      seen_ = intersect(keys, mask_.keys_of_any(all_rows()));
    int32_t end = tiles().last + 1;
#pragma unroll 1
    while ((end = end_of_seen(end)) > tiles().first) {
      find_window(end);
      end -= kWindow;
    }
  }

  // The end of the last tile before tile `end` of which the rows may see something; 0: there is
  // none.
  TILEWISE_DEVICE int32_t end_of_seen(int32_t end) const {
    if (end <= tiles().first) return 0;
    const KeyRun walked = {tiles().first * kKeys, end_key(end)};
    uint32_t last = 0;
    if (mask_.mask.is_ranges()) {
      for_chunks([&](const NearRange& own) {
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
    if (mask_.mask.is_ranges())
      coverage = coverage_by_ranges({tile * kKeys, end_key(tile + 1)});
    else if (tile >= tiles().first)
      coverage = mask_.mask.coverage(mask_.heads, all_rows(), keys_of(tile, tile + 1));
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

  TILEWISE_DEVICE void publish(int32_t end, uint32_t visible, uint32_t full) {
    if (warp_ != 0) return;
    const int stage = window_state_.stage();
    shared_.window_empty(stage).wait(window_state_.phase() ^ 1);
    if (ptx::lane_index() == 0) {
      const ptx::SharedAddress window = shared_.window(stage);
      ptx::st_shared_b32(window, static_cast<uint32_t>(end));
      ptx::st_shared_b32(window + 4, visible);
      ptx::st_shared_b32(window + 8, full);
      shared_.window_full(stage).arrive();
    }
    window_state_.next();
  }

  // --- a mask of ranges: each lane holds one of every 32 ---

  TILEWISE_DEVICE NearRange near_range(int64_t first) const {
    const Mask& mask = mask_.mask;
    const int64_t i = first + ptx::lane_index();
    if (i >= mask.range_count()) return {};
    const int64_t at = mask.entry_of_range(i) * MaskRange::kFields;
    return NearRange::of(MaskRange::of(mask.mask->entries + at), first_row());
  }

  // Calls visit(range of the lane) for every 32 ranges. The first ones stay in registers.
  template <class Visit>
  TILEWISE_DEVICE void for_chunks(const Visit& visit) const {
    visit(near_);
#pragma unroll 1
    for (int64_t first = ptx::kWarpSize; first < mask_.mask.range_count(); first += ptx::kWarpSize)
      visit(near_range(first));
  }

  // Calls visit(range), in all lanes, for the ranges that show some of the keys.
  template <class Visit>
  TILEWISE_DEVICE void for_ranges(const KeyRun& keys, const Visit& visit) const {
    for_chunks([&](const NearRange& own) {
      const KeyRun seen = own.keys_of_any(rows(), keys);
#pragma unroll 1
      for (uint32_t left = ptx::ballot(seen.begin < seen.end); left != 0; left &= left - 1)
        visit(own.of_lane(ptx::bit_width(left & (~left + 1)) - 1));
    });
  }

  // The coverage of a tile by the ranges. Each lane gives the keys of another tile of the window.
  TILEWISE_DEVICE Coverage coverage_by_ranges(const KeyRun& keys) const {
    const KeyRun window = {
        static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.begin), 31)),
        static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.end), 0))};
    bool some = false;
    bool all = false;
    for_ranges(window, [&](const NearRange& range) {
      const KeyRun seen = range.keys_of_any(rows(), keys);
      some = some || seen.begin < seen.end;
      all = all || range.shows_all(rows(), keys);
    });
    return all ? Coverage::full : some ? Coverage::partial : Coverage::none;
  }

  // --- the bits of a tile ---

  // Writes what each row sees of the tile that begins at `key`. Rows past the last one repeat it.
  TILEWISE_DEVICE void write_bits(int32_t key) {
    const int stage = bits_state_.stage();
    shared_.bits_empty(stage).wait(bits_state_.phase() ^ 1);
    if (mask_.mask.is_ranges()) {
      uint32_t words[kPasses][kWords] = {};
      for_ranges({key, key + kKeys}, [&](const NearRange& range) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const KeyRun run = range.keys_of(row(pass));
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[pass][w] |= run.bits(key, w);
        }
      });
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) store_bits(stage, pass, key, words[pass]);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        uint32_t words[kWords] = {};
        mask_.mask.add_bits(head(), first_row() + row(pass),
                            MaskBits{words, 1, {key, int64_t{key} + kKeys}});
        store_bits(stage, pass, key, words);
      }
    }
    ptx::sync_warp();
    if (ptx::lane_index() == 0) shared_.bits_full(stage).arrive();
    bits_state_.next();
  }

  // Stores the bits of a row without those that the band hides.
  TILEWISE_DEVICE void store_bits(int stage, int pass, int32_t key,
                                  const uint32_t (&words)[kWords]) const {
    const KeyRun band = {max(0, tiles().lower + row(pass)),
                         min(tiles().keys, tiles().upper + row(pass))};
    const ptx::SharedAddress to = shared_.bits(stage, row_of_lane(pass));
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
  NearRange near_;
  Range seen_;  // blocks: the hull of the keys
  typename Shared::WindowPipeline window_state_;
  typename Shared::BitsPipeline bits_state_;
};

}  // namespace tilewise::cuda::wgmma
