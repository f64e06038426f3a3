// The mask of the backward's masked form. One warp reads it and finds out, ahead of the roles that
// need it, which row tiles of a work tile are visible, and which scores of those are hidden.
//
// It describes the row tiles of one query head of the group after the other, from the first one to
// the last. Windows and bits (mask_shared.h) describe what mask, band and lengths show together.
// Where rows and keys change places, NearRange's rows are the keys of the CTA.
#pragma once

#include "cuda/common/tile_coverage.h"
#include "cuda/wgmma/backward_steps.h"
#include "cuda/wgmma/mask_range.h"

namespace tilewise::cuda::wgmma {

// Transposes 32 x 32 bits: bit i of lane k becomes bit k of lane i. A whole warp calls it.
TILEWISE_DEVICE uint32_t transpose_bits(uint32_t x) {
  uint32_t low = 0x0000ffffu;  // those bits i with (i & step) == 0
#pragma unroll
  for (int step = 16; step != 0; step /= 2) {
    const uint32_t other = ptx::shuffle_xor(x, step);
    if ((ptx::lane_index() & step) == 0)
      x = (x & low) | (other & low) << step;
    else
      x = (x & ~low) | (other & ~low) >> step;
    low ^= low << (step / 2);
  }
  return x;
}

template <class C>
class BackwardMaskReader : NearRanges<BackwardMaskReader<C>> {
  using Ranges = NearRanges<BackwardMaskReader<C>>;
  using Plan = BackwardPlan<C>;
  using MaskRegion = typename Plan::MaskRegion;
  friend Ranges;
  static constexpr int kQueries = Plan::kQueries;
  static constexpr int kWords = MaskRegion::kWords;  // of rows
  static constexpr int kKeyWords = Plan::kKeys / static_cast<int>(kMaskWord);
  static constexpr int kKeysAtOnce = 8 / kWords;  // per lane, so that the words stay in registers

 public:
  TILEWISE_DEVICE BackwardMaskReader(const TmaBackwardParams& params, ptx::SharedAddress shared)
      : p_(params),
        shared_(shared),
        mask_(*reinterpret_cast<common::CtaMask*>(ptx::shared_memory() + Plan::kCtaMask)),
        writer_({shared}) {}

  TILEWISE_DEVICE void run() {
    const BackwardBarriers barriers{shared_ + Plan::kBarriers};
    ptx::griddepcontrol_wait();  // for the descriptors
#pragma unroll 1
    for (int32_t tile_number = 0;; ++tile_number) {
      const int stage = tile_number % Plan::kDescriptorStages;
      ptx::mbarrier_wait_parity(barriers.descriptor_full(stage),
                                tile_number / Plan::kDescriptorStages & 1);
      work_tile_ = &tile_descriptor<C>(stage);
      if (work_tile_->steps < 0) break;
      if (work_tile_->steps > 0) find_windows();
      ptx::sync_warp();  // the work tile has been read
      writer_.publish(RowWindow{}, 0, 0);
    }
  }

 private:
  // The work tile, read again at each use, because a lane of this warp has few registers.
  TILEWISE_DEVICE int32_t tiles() const {  // per head
    return (work_tile_->row_end - work_tile_->row) / kQueries;
  }
  TILEWISE_DEVICE int32_t end_row() const { return min(work_tile_->rows, work_tile_->row_end); }
  TILEWISE_DEVICE int32_t row_of(int32_t tile) const {
    return min(end_row(), work_tile_->row + tile * kQueries);
  }
  TILEWISE_DEVICE Range keys() const {
    return {work_tile_->key, int64_t{work_tile_->key} + work_tile_->key_count};
  }

  TILEWISE_DEVICE const Mask& mask() const { return mask_.mask; }
  TILEWISE_DEVICE NearRange near(const MaskRange& range) const {
    return NearRange::of(range.transposed(), work_tile_->key);
  }
  TILEWISE_DEVICE int32_t rows() const { return work_tile_->key_count; }

  // Deterministic sums wait for every key tile before this one, so no row tile may be left out.
  TILEWISE_DEVICE bool visits_all() const { return p_.dq_semaphores != nullptr; }

  TILEWISE_DEVICE void find_windows() {
    const int32_t heads = work_tile_->steps / tiles();
    const int32_t first_head = work_tile_->query_head;
    ptx::sync_warp();  // the mask of the work tile before has been read
    mask_.set(p_.mask, work_tile_->batch, {first_head, first_head + heads},
              {work_tile_->row, end_row()}, keys());
    ptx::sync_warp();
    if (mask().is_ranges()) Ranges::load_ranges();
#pragma unroll 1
    for (int32_t head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int32_t tile = 0; (tile = first_seen(tile)) < tiles(); tile += kWindowTiles)
        find_window({tile, head});
    }
  }

  // The first tile from `tile` on whose rows may see something, or a number past the last tile.
  TILEWISE_DEVICE int32_t first_seen(int32_t tile) const {
    if (tile >= tiles() || !mask().is_ranges() || visits_all()) return tile;
    const KeyRun walked = {row_of(tile), end_row()};
    uint32_t found = 0;  // ~row
    Ranges::for_chunks([&](const NearRange& own) {
      const KeyRun seen = own.keys_of_any(rows(), walked);
      if (seen.begin < seen.end) found = max(found, ~static_cast<uint32_t>(seen.begin));
    });
    found = ptx::highest(found);
    return found == 0 ? tiles() : (static_cast<int32_t>(~found) - work_tile_->row) / kQueries;
  }

  // One tile per lane.
  TILEWISE_DEVICE void find_window(const RowWindow& window) {
    const int32_t tile = window.tile + ptx::lane_index();
    const KeyRun of_tile = {row_of(tile), row_of(tile + 1)};
    Coverage coverage = Coverage::none;
    if (mask().is_ranges()) {
      coverage = Ranges::coverage_by_ranges(
          of_tile, {row_of(window.tile), row_of(window.tile + kWindowTiles)});
    } else if (of_tile.begin < of_tile.end) {
      const int32_t head = work_tile_->query_head + window.head;
      coverage = mask().coverage({head, head + 1}, {of_tile.begin, of_tile.end}, keys());
    }
    const bool is_full =
        coverage == Coverage::full && unmasked_rows(*work_tile_).contains(of_tile.begin);
    const uint32_t visible =
        ptx::ballot(of_tile.begin < of_tile.end && (coverage != Coverage::none || visits_all()));
    const uint32_t full = ptx::ballot(is_full);
    if (visible == 0) return;
    writer_.publish(window, visible, full);
#pragma unroll 1
    for (uint32_t left = visible & ~full; left != 0; left &= left - 1) {
      const int32_t bit = ptx::bit_width(left & (~left + 1)) - 1;
      write_bits(work_tile_->query_head + window.head, row_of(window.tile + bit));
    }
  }

  // Writes which rows of the tile that begins at `row` see each key.
  TILEWISE_DEVICE void write_bits(int32_t head, int32_t row) {
    const int stage = writer_.begin_bits();
    if (mask().is_ranges())
      write_bits_of_ranges(stage, row);
    else
      write_bits_of_blocks(stage, head, row);
    writer_.end_bits();
  }

  TILEWISE_DEVICE void write_bits_of_ranges(int stage, int32_t row) const {
#pragma unroll 1
    for (int first = 0; first < Plan::kKeys; first += kKeysAtOnce * ptx::kWarpSize) {
      const auto key_of = [&](int i) { return first + i * ptx::kWarpSize + ptx::lane_index(); };
      uint32_t words[kKeysAtOnce][kWords] = {};
      Ranges::add_bits_of_ranges(words, row, key_of);
#pragma unroll
      for (int i = 0; i < kKeysAtOnce; ++i) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) store_word(stage, key_of(i), row, w, words[i][w]);
      }
    }
  }

  // Masks of blocks have the bits of keys: a lane reads those of a row.
  TILEWISE_DEVICE void write_bits_of_blocks(int stage, int32_t head, int32_t row) const {
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
      uint32_t words[kKeyWords] = {};
      mask().add_bits(
          head, row + w * ptx::kWarpSize + ptx::lane_index(),
          MaskBits{words, 1, {work_tile_->key, int64_t{work_tile_->key} + Plan::kKeys}});
#pragma unroll
      for (int k = 0; k < kKeyWords; ++k)
        store_word(stage, k * ptx::kWarpSize + ptx::lane_index(), row, w, transpose_bits(words[k]));
    }
  }

  // Stores word `w` of a key of the CTA without the rows that the band hides.
  TILEWISE_DEVICE void store_word(int stage, int key, int32_t row, int w, uint32_t word) const {
    const int32_t diagonal = work_tile_->key + key;
    const KeyRun band = {max(0, diagonal - work_tile_->high),
                         min(work_tile_->rows - 1, diagonal - work_tile_->low) + 1};
    const bool exists = key < work_tile_->key_count;
    ptx::st_shared_b32(MaskRegion{shared_}.bits(stage, key) + static_cast<uint32_t>(w) * 4,
                       exists ? word & band.bits(row, w) : 0);
  }

  const TmaBackwardParams& p_;
  const ptx::SharedAddress shared_;
  common::CtaMask& mask_;
  const TileDescriptor* work_tile_ = nullptr;
  MaskWriter<MaskRegion> writer_;
};

}  // namespace tilewise::cuda::wgmma
