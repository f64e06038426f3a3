// The properties of a CTA's key tile that are needed only where rows end or are masked. They lie in
// shared memory, since registers are scarce.
#pragma once

#include "cuda/common/unmasked_rows.h"
#include "cuda/mma_sync/backward_plan.h"
#include "cuda/ptx/block.h"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class KeyTile {
  using Plan = BackwardPlan<C>;

 public:
  // One thread calls it; a barrier must follow before anything is read.
  TILEWISE_DEVICE static void store(ptx::SharedAddress shared, const TileOrder::WorkTile& work_tile,
                                    const Band& band, Range row_tiles, int64_t head_tiles,
                                    bool last_first, bool far_rows) {
    const int64_t key = work_tile.tile * int64_t{Plan::kKeys};
    const Range keys = {key, min(band.keys, key + Plan::kKeys)};
    // With far rows every tile takes the masked branch, which handles them.
    const Range all = keys.size() == Plan::kKeys && !far_rows ? band.rows_of_all(keys) : Range{};
    const int64_t all_end = all.end == band.rows ? common::kMaxRow : all.end - Plan::kQueries + 1;
    const int64_t x[kWords] = {
        clamp(key - band.shift() - band.right, -common::kMaxRow, common::kMaxRow),
        clamp(key - band.shift() + band.left, -common::kMaxRow, common::kMaxRow),
        key,
        band.keys,
        row_tiles.begin * Plan::kQueries,
        band.rows,
        head_tiles - row_tiles.size(),
        (last_first ? kLastFirst : 0) | (far_rows ? kFarRows : 0),
        work_tile.head,
        work_tile.sequence,
        all.begin,
        all.empty() ? 0 : all_end};
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      ptx::st_shared_b32(shared + Plan::kKeyTile + i * 4, static_cast<uint32_t>(x[i]));
  }

  TILEWISE_DEVICE explicit KeyTile(ptx::SharedAddress shared) : at_(shared + Plan::kKeyTile) {}

  // The rows that see key 0 of the CTA are first_row() ... last_row().
  TILEWISE_DEVICE int32_t first_row() const { return get(kFirstRow); }
  TILEWISE_DEVICE int32_t last_row() const { return get(kLastRow); }
  TILEWISE_DEVICE Range keys() const {
    return {get(kFirstKey), min(get(kKeyEnd), get(kFirstKey) + Plan::kKeys)};
  }
  // The keys from key 0 of the CTA to the end of the sequence.
  TILEWISE_DEVICE int32_t key_count() const { return get(kKeyEnd) - get(kFirstKey); }
  TILEWISE_DEVICE common::UnmaskedRows unmasked_rows() const {
    return {get(kUnmaskedBegin), get(kUnmaskedEnd)};
  }
  // The first row that is walked in each head, and the number of tiles skipped between heads.
  TILEWISE_DEVICE int32_t begin() const { return get(kFirstWalkedRow); }
  TILEWISE_DEVICE int32_t skipped_tiles() const { return get(kSkippedTiles); }
  TILEWISE_DEVICE int32_t head() const { return get(kHead); }
  TILEWISE_DEVICE int32_t sequence() const { return get(kSequence); }
  // Whether the call has far rows (BackwardParams::far_rows).
  TILEWISE_DEVICE bool far_rows() const { return (get(kFlags) & kFarRows) != 0; }

  // How many key tiles add to the row tile at `row` before this one. CTAs are numbered in the same
  // order (TileOrder), so a CTA only waits for earlier ones.
  TILEWISE_DEVICE int32_t semaphore_value(int32_t row) const {
    const int32_t key = get(kFirstKey);
    const int32_t begin = max(0, row + key - last_row());
    const int32_t end =
        min(get(kKeyEnd), min(get(kRowEnd), row + Plan::kQueries) + key - first_row());
    const int32_t tile = key / Plan::kKeys;
    return (get(kFlags) & kLastFirst) != 0 ? (end - 1) / Plan::kKeys - tile
                                           : tile - begin / Plan::kKeys;
  }

 private:
  // The words that `store` writes.
  enum Word : int {
    kFirstRow,
    kLastRow,
    kFirstKey,
    kKeyEnd,
    kFirstWalkedRow,
    kRowEnd,
    kSkippedTiles,
    kFlags,
    kHead,
    kSequence,
    kUnmaskedBegin,
    kUnmaskedEnd,
    kWords
  };
  static_assert(Plan::kKeyTile + kWords * 4 == Plan::kMask);
  static constexpr int64_t kLastFirst = 1;  // in kFlags
  static constexpr int64_t kFarRows = 2;

  TILEWISE_DEVICE int32_t get(Word word) const {
    return static_cast<int32_t>(ptx::ld_shared_b32(at_ + word * 4));
  }

  ptx::SharedAddress at_;
};

}  // namespace tilewise::cuda::mma_sync
