// The mask of the query tile of a CTA: which key tiles it walks, and which scores of a tile it
// hides. It lies in shared memory behind the saved QueryTile.
#pragma once

#include "cuda/common/tile_coverage.h"
#include "cuda/mma_sync/forward_softmax.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class MaskedTiles {
 public:
  // Narrows the key tiles of `q_tile` to those that the mask shows. All threads of the CTA call it.
  TILEWISE_DEVICE void find(const ForwardParams& p, QueryTile& q_tile) {
    KeyTiles& tiles = q_tile.tiles;
    const Range rows = {q_tile.rows.first, int64_t{q_tile.rows.first} + q_tile.rows.last_row() + 1};
    const Range heads = {q_tile.rows.first_head,
                         int64_t{q_tile.rows.first_head} + q_tile.rows.group};
    const Range keys = keys_of(q_tile, tiles.first, tiles.last + 1);
    if (ptx::warp_index() == 0) mask_.set(p.mask, q_tile.sequence.batch, heads, rows, keys);
    ptx::sync_block();
    const Range seen = intersect(keys, mask_.keys_of_any(rows));
    const int32_t end = seen.empty() ? tiles.first : tile_of(seen.end - 1) + 1;
    if (!seen.empty()) tiles.first = tile_of(seen.begin);
    if (ptx::thread_index() == 0) first_ = tiles.first;
    coverage_.find(end - tiles.first, C::kForward.threads(), [&](int32_t begin, int32_t stop) {
      return mask_.mask.coverage(heads, rows,
                                 keys_of(q_tile, tiles.first + begin, tiles.first + stop));
    });
    ptx::sync_block();
    tiles.last = before(end);
  }

  // The last visible tile before `tile`, or the one before the first tile of the CTA.
  TILEWISE_DEVICE int32_t before(int32_t tile) const {
    return first_ + coverage_.last_before(tile - first_);
  }

  TILEWISE_DEVICE bool is_full(int32_t tile) const { return coverage_.is_full(tile - first_); }

  // Finds the bits of a tile for the warp's own rows, one row per lane, before `hide` reads them.
  // Between the two the CTA meets at a barrier, so that column warps see each other's bits.
  TILEWISE_DEVICE void find_bits(const QueryTile& q_tile, int32_t tile) {
    const int thread = opaque_thread<C>();
    const int lane = thread % ptx::kWarpSize;
    const int64_t first = int64_t{tile} * C::kForward.keys;
    ptx::sync_warp();  // the bits of an earlier tile have been read
    if (lane < kOwnRows<C>) {
      const int row = thread / ptx::kWarpSize * kOwnRows<C> + lane;
      const int32_t r = min(row, q_tile.rows.count - 1);
#pragma unroll
      for (uint32_t& word : bits_[row]) word = 0;
      mask_.mask.add_bits(q_tile.head(r), q_tile.rows.first + q_tile.rows.row(r),
                          MaskBits{bits_[row], 1, {first, first + C::kForward.keys}});
    }
    ptx::sync_warp();
  }

  // Hidden scores become -inf.
  TILEWISE_DEVICE void hide(Scores<C>& s) const {
    constexpr int kColumns = static_cast<int>(kMaskWord) / 8;  // of 8 keys, per word
    const LanePosition position = lane_position<C>();
#pragma unroll
    for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
          const uint32_t word = bits_[position.row(m, h)][n / kColumns] >> position.column;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if ((word >> (n % kColumns * 8 + e) & 1u) == 0) s.x[m][n][2 * h + e] = kMinusInfinity;
          }
        }
      }
    }
  }

 private:
  static constexpr int kWords = static_cast<int>(ceil_div(C::kForward.keys, kMaskWord));

  TILEWISE_DEVICE static Range keys_of(const QueryTile& q_tile, int32_t begin, int32_t end) {
    return {int64_t{begin} * C::kForward.keys,
            min<int64_t>(q_tile.tiles.keys, int64_t{end} * C::kForward.keys)};
  }
  TILEWISE_DEVICE static int32_t tile_of(int64_t key) {
    constexpr uint32_t kKeys = C::kForward.keys;
    return static_cast<int32_t>(static_cast<uint32_t>(key) / kKeys);
  }

  common::CtaMask mask_;
  common::TileCoverage coverage_;
  int32_t first_;  // the tile of entry 0 of the coverage
  uint32_t bits_[C::kForward.rows()][kWords];
};

// At an opaque address, as `saved_q_tile`.
template <class C>
TILEWISE_DEVICE MaskedTiles<C>& masked_tiles() {
  return *reinterpret_cast<MaskedTiles<C>*>(ptx::shared_memory() +
                                            ptx::opaque(uint32_t{kMaskAt<C>}));
}

}  // namespace tilewise::cuda::mma_sync
