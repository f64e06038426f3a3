// The visible tiles and scores of a masked form, as its mask warps describe them to the other roles
// through shared memory.
//
// They describe the key tiles of a work tile in windows of 32: one bit says whether a tile is
// visible, another whether all of its pairs are. For each visible tile that is not full they write
// a bit per row and key. In the backward, whose work tile is a tile of keys that walks row tiles,
// rows and keys change places here.
//
// Every lane arrives for what it has read or stored itself: racecheck does not see that a barrier
// of the warp orders it before the arrival of another lane.
#pragma once

#include "attention/mask.h"
#include "cuda/common/pipeline.h"
#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::wgmma {

// Position in a pipeline of kStages stages: `count` is the number of stages that have been filled
// (producer) or emptied (consumer). The producer and scheduler warps use it because it takes one
// register per pipeline.
template <int kStages>
struct PipelineCounter {
  static_assert((kStages & (kStages - 1)) == 0);

  uint32_t count = 0;

  TILEWISE_DEVICE int stage() const { return static_cast<int>(count % kStages); }
  TILEWISE_DEVICE int phase() const { return static_cast<int>(count / kStages % 2); }
  TILEWISE_DEVICE void next() { ++count; }
};

// The mask warps are ahead of the loads by up to eight windows, and of the consumers by up to four
// tiles that are not full.
inline constexpr int kWindowStages = 8;
inline constexpr int kBitsStages = 4;
inline constexpr int kMaskBarriers = 2 * (kWindowStages + kBitsStages);
inline constexpr int kWindowTiles = 32;

struct MaskLayout {
  int rows;  // of a work tile
  int keys;  // of a tile that it walks
  int mask_warps;
  int consumer_warps;
  int other_warps;  // that also walk the visible tiles
  // Offsets in shared memory, in bytes.
  int barriers_at;
  int at;
};

template <MaskLayout kLayout>
struct MaskShared {
  static constexpr int kWindowBytes = 16;
  static constexpr int kKeys = kLayout.keys;
  static constexpr int kWords = kKeys / static_cast<int>(kMaskWord);  // of bits, per row
  static constexpr int kBitsBytes = kLayout.rows * kWords * 4;
  static constexpr int kBitsAt = kLayout.at + kWindowStages * kWindowBytes;
  static constexpr int kEnd = kBitsAt + kBitsStages * kBitsBytes;

  using Barrier = common::Barrier;

  ptx::SharedAddress base;

  // One per 32 tiles: which tiles they are, and the bits that say which of them are visible and
  // which are full.
  TILEWISE_DEVICE ptx::SharedAddress window(int stage) const {
    return at(kLayout.at + stage * kWindowBytes);
  }
  TILEWISE_DEVICE ptx::SharedAddress bits(int stage, int row) const {
    return at(kBitsAt + stage * kBitsBytes + row * kWords * 4);
  }

  TILEWISE_DEVICE Barrier window_full(int stage) const { return barrier(stage); }
  TILEWISE_DEVICE Barrier window_empty(int stage) const { return barrier(kWindowStages + stage); }
  TILEWISE_DEVICE Barrier bits_full(int stage) const { return barrier(2 * kWindowStages + stage); }
  TILEWISE_DEVICE Barrier bits_empty(int stage) const { return bits_full(kBitsStages + stage); }

  // Called by one thread, before the fence that makes barriers visible.
  TILEWISE_DEVICE void init_barriers() const {
    for (int i = 0; i < kWindowStages; ++i) {
      window_full(i).init(1);
      window_empty(i).init((kLayout.consumer_warps + kLayout.other_warps) * ptx::kWarpSize);
    }
    for (int i = 0; i < kBitsStages; ++i) {
      bits_full(i).init(kLayout.mask_warps * ptx::kWarpSize);
      bits_empty(i).init(kLayout.consumer_warps * ptx::kWarpSize);
    }
  }

 private:
  TILEWISE_DEVICE ptx::SharedAddress at(int bytes) const {
    return base + static_cast<uint32_t>(bytes);
  }
  TILEWISE_DEVICE Barrier barrier(int index) const { return {at(kLayout.barriers_at + 8 * index)}; }
};

// A walk over the visible tiles of one work tile after the other. `Place` says which tiles a window
// describes. The roles that walk keep their state in registers.
template <class Shared, class Place>
class VisibleTiles {
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

  // The next tile, which there must be: its bit in the window, counted from 1.
  TILEWISE_DEVICE int32_t take() {
    const int32_t tile = ptx::bit_width(visible_ & (~visible_ + 1));
    visible_ &= visible_ - 1;
    return tile;
  }
  TILEWISE_DEVICE const Place& place() const { return place_; }

 private:
  TILEWISE_DEVICE void read_window() {
    const int stage = state_.stage();
    shared_.window_full(stage).wait(state_.phase());
    const ptx::SharedAddress window = shared_.window(stage);
    place_.read(window);
    visible_ =
        static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(ptx::ld_shared_b32(window + 4))));
    full_ =
        static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(ptx::ld_shared_b32(window + 8))));
    shared_.window_empty(stage).arrive();
    state_.next();
  }

  Shared shared_;
  PipelineCounter<kWindowStages> state_;
  Place place_;
  uint32_t visible_ = 0;
  uint32_t full_ = 0;
};

// The bits of tiles that are not full, as a consumer warp reads them.
template <class Shared>
class HiddenScores {
 public:
  TILEWISE_DEVICE explicit HiddenScores(const Shared& shared) : shared_(shared) {}

  // Hidden scores of the next such tile become `hidden`. `score(n, 2 h + e)` is that of row `row` +
  // 8 h and key 8 n + `column` + e.
  template <class Score>
  TILEWISE_DEVICE void hide(const Score& score, int row, int column, float hidden) {
    constexpr int kColumns = static_cast<int>(kMaskWord) / 8;  // of 8 keys, per word
    const int stage = state_.stage();
    shared_.bits_full(stage).wait(state_.phase());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[Shared::kWords];
      read(words, shared_.bits(stage, row + 8 * h));
#pragma unroll
      for (int n = 0; n < Shared::kKeys / 8; ++n) {
        const uint32_t word = words[n / kColumns] >> column;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((word >> (n % kColumns * 8 + e) & 1u) == 0) score(n, 2 * h + e) = hidden;
        }
      }
    }
    shared_.bits_empty(stage).arrive();
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
  PipelineCounter<kBitsStages> state_;
};

// The other side of both: the stages that a mask warp fills.
template <class Shared>
class MaskWriter {
 public:
  TILEWISE_DEVICE explicit MaskWriter(const Shared& shared) : shared_(shared) {}

  // One of the mask warps calls it. A window without a visible tile ends the work tile.
  template <class Place>
  TILEWISE_DEVICE void publish(const Place& place, uint32_t visible, uint32_t full) {
    const int stage = window_state_.stage();
    shared_.window_empty(stage).wait(window_state_.phase() ^ 1);
    if (ptx::lane_index() == 0) {
      const ptx::SharedAddress window = shared_.window(stage);
      place.write(window);
      ptx::st_shared_b32(window + 4, visible);
      ptx::st_shared_b32(window + 8, full);
      shared_.window_full(stage).arrive();
    }
    window_state_.next();
  }

  // The stage for the bits of the next tile that is not full. Each mask warp writes its rows of it.
  TILEWISE_DEVICE int begin_bits() const {
    const int stage = bits_state_.stage();
    shared_.bits_empty(stage).wait(bits_state_.phase() ^ 1);
    return stage;
  }
  TILEWISE_DEVICE void end_bits() {
    shared_.bits_full(bits_state_.stage()).arrive();
    bits_state_.next();
  }

 private:
  Shared shared_;
  PipelineCounter<kWindowStages> window_state_;
  PipelineCounter<kBitsStages> bits_state_;
};

}  // namespace tilewise::cuda::wgmma
