// What a mask shows of the tiles that a CTA walks, in shared memory: computed by all of its threads
// when it starts, so that the next visible tile is found by looking for a bit.
#pragma once

#include "cuda/common/listed_ranges.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda::common {

// The mask of one sequence, as far as it concerns the heads, rows and keys of a CTA.
struct CtaMask {
  Mask mask;
  Range heads;
  ListedRanges<64> listed;

  // One whole warp calls it.
  TILEWISE_DEVICE void set(const tilewise_mask& given, int64_t batch, Range heads_of_cta,
                           Range rows, Range keys) {
    const Mask found = listed.list(Mask::of(&given, batch), rows, keys);
    if (ptx::lane_index() != 0) return;
    mask = found;
    heads = heads_of_cta;
  }

  TILEWISE_DEVICE Range keys_of_any(Range rows) const { return mask.keys_of_any(heads, rows); }
};

// Two bits for each of up to kMaxEntries entries, which stand for one tile each or, if there are
// more tiles, for 2, 4, ... neighbouring tiles.
class TileCoverage {
 public:
  static constexpr int32_t kMaxEntries = 1024;

  // The power of two of tiles per entry.
  TILEWISE_DEVICE static int32_t shift_of(int32_t tiles) {
    int32_t shift = 0;
    while (tiles > kMaxEntries << shift) ++shift;
    return shift;
  }

  // All threads of the CTA call it; a barrier must follow. `of(first, end)` is the coverage of the
  // tiles [first, end).
  template <class Of>
  TILEWISE_DEVICE void find(int32_t tiles, int threads, const Of& of) {
    const int32_t shift = shift_of(tiles);
    const int32_t step = 1 << shift;
    const int lane = ptx::lane_index();
    if (ptx::thread_index() == 0) shift_ = shift;
#pragma unroll 1
    for (int32_t word = ptx::warp_index(); word * ptx::kWarpSize << shift < tiles;
         word += threads / ptx::kWarpSize) {
      const int32_t first = (word * ptx::kWarpSize + lane) << shift;
      Coverage coverage = Coverage::none;
      if (first < tiles) coverage = of(first, min(tiles, first + step));
      const uint32_t visible = ptx::ballot(coverage != Coverage::none);
      const uint32_t full = ptx::ballot(coverage == Coverage::full);
      if (lane != 0) continue;
      visible_[word] = visible;
      full_[word] = full;
    }
  }

  TILEWISE_DEVICE bool is_full(int32_t tile) const { return is_set(full_, tile >> shift_); }

  // The number of visible tiles among the first `tiles`, with which `find` was called.
  TILEWISE_DEVICE int32_t count(int32_t tiles) const {
    const int32_t entries = ((tiles - 1) >> shift_) + 1;
    int32_t visible = 0;
#pragma unroll 1
    for (int32_t word = 0; word * 32 < entries; ++word)
      visible += ptx::count_ones(visible_[word]) << shift_;
    const bool last = tiles > 0 && is_set(visible_, entries - 1);
    return last ? visible - (entries << shift_) + tiles : visible;
  }

  // The first visible tile from `tile` on, or `tiles`, with which `find` was called.
  TILEWISE_DEVICE int32_t first_from(int32_t tile, int32_t tiles) const {
    if (tile >= tiles) return tiles;
    const int32_t entry = tile >> shift_;
    int32_t word = entry / 32;
    uint32_t bits = visible_[word] & ~0u << (entry % 32);
    while (bits == 0) {
      if (++word * 32 << shift_ >= tiles) return tiles;
      bits = visible_[word];
    }
    const int32_t found = word * 32 + ptx::bit_width(bits & (~bits + 1)) - 1;
    return max(tile, found << shift_);
  }

  // The last visible tile before `end`, or -1.
  TILEWISE_DEVICE int32_t last_before(int32_t end) const {
    if (end <= 0) return -1;
    const int32_t entry = (end - 1) >> shift_;
    int32_t word = entry / 32;
    uint32_t bits = visible_[word] & ~0u >> (31 - entry % 32);
    while (bits == 0) {
      if (word == 0) return -1;
      bits = visible_[--word];
    }
    const int32_t found = word * 32 + ptx::bit_width(bits) - 1;
    return min(end, (found + 1) << shift_) - 1;
  }

 private:
  static constexpr int32_t kWords = kMaxEntries / 32;

  TILEWISE_DEVICE static bool is_set(const uint32_t (&words)[kWords], int32_t entry) {
    return (words[entry / 32] >> (entry % 32) & 1u) != 0;
  }

  int32_t shift_;
  uint32_t visible_[kWords];
  uint32_t full_[kWords];
};

}  // namespace tilewise::cuda::common
