// Descriptor of a work tile of the forward, which the tile scheduler warp writes for the other
// roles.
#pragma once

#include "cuda/common/query_tile.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

enum class TileKind : int32_t { end, no_keys, keys };

// The key tiles that the rows of a warpgroup see, out of those of the CTA, from the last to the
// first. A warpgroup whose rows see none of the CTA's keys computes one key tile that is masked as
// a whole.
struct WarpgroupTiles {
  TileKind kind;  // end: no work tile is left; no_keys: the rows of the CTA see no key
  int32_t first;
  int32_t last;
  int32_t full_begin;
  // Tiles in [full_begin, full_end) are seen in full by all rows, and every row has seen a key in
  // an earlier step.
  int32_t full_end;
  int32_t skip_before;
  int32_t skip_after;  // key tiles of the CTA before (after) those of the warpgroup, in loop order

  TILEWISE_DEVICE static WarpgroupTiles of(const QueryTile& work_tile, int warpgroup,
                                           int32_t step) {
    const KeyTiles& block = work_tile.tiles;
    const int32_t row0 = work_tile.rows.row(64 * warpgroup);
    const int32_t row1 = work_tile.rows.row(min(64 * warpgroup + 63, work_tile.rows.count - 1));
    const int32_t end = max(1, min(block.keys, block.upper + row1));
    const int32_t last = clamp32((end - 1) / step, block.first, block.last);
    const int32_t first = clamp32(max(0, block.lower + row0) / step, block.first, last);
    const int32_t full_begin = max(first, (max(0, block.lower + row1) + step - 1) / step);
    const int32_t seen = max(0, min(block.keys, block.upper + row0));  // by the first row
    const bool last_is_full = seen == (last + 1) * step;
    const int32_t full_end = last_is_full ? last + 1 : max(0, seen - 1) / step;
    const TileKind kind = block.first > block.last ? TileKind::no_keys : TileKind::keys;
    return {kind, first, last, full_begin, full_end, block.last - last, first - block.first};
  }

  // Key tiles below the result have no key right of the diagonal of any row of the warpgroup.
  TILEWISE_DEVICE static int32_t left_of_diagonal(const QueryTile& work_tile, int warpgroup,
                                                  int32_t step) {
    const int32_t row0 = work_tile.rows.row(64 * warpgroup);
    const int64_t diagonal = work_tile.rows.first + row0 + work_tile.sequence.band.shift();
    return static_cast<int32_t>(clamp(diagonal + 1, 0, work_tile.tiles.keys)) / step;
  }

 private:
  TILEWISE_DEVICE static int32_t clamp32(int32_t x, int32_t low, int32_t high) {
    return max(low, min(x, high));
  }
};

// Flips the sign of the elements of a tile. All threads of a warpgroup call it.
template <class Element, class Tile>
TILEWISE_DEVICE void negate(const Tile& tile, int thread) {
#pragma unroll 1
  for (int at = thread * 16; at < Tile::kBytes; at += ptx::kWarpgroupSize * 16) {
    uint32_t x[4];
    ptx::ld_shared_v4_b32(x, tile.base + static_cast<uint32_t>(at));
    for (uint32_t& word : x) word ^= Element::kBytes == 1 ? 0x80808080u : 0x80008000u;
    ptx::st_shared_v4_b32(tile.base + static_cast<uint32_t>(at), x);
  }
}

// The factors of a tile with float8: the scale of its scores, and the factor of its values.
template <bool kFloat8>
struct WorkTileFactors {};
template <>
struct WorkTileFactors<true> {
  float scale;  // of either sign
  float values;

  TILEWISE_DEVICE void set_factors(const Problem& p, int64_t batch, int64_t kv_head) {
    scale = score_of(p).scale * score_descale(p, batch, kv_head);
    values = v_descale(p, batch, kv_head);
  }
};

// A tile of query rows and the key tiles that they see.
template <class C>
struct ForwardWorkTile : QueryTile, WorkTileFactors<C::kFloat8> {
  int32_t index;  // below num_tiles, or that of a Stream-K share
  char* out;      // of row 0, if heads are not packed
  int64_t lse;    // offset in lse of row 0, likewise
  WarpgroupTiles warpgroup_tiles[C::kForward.consumer_warpgroups];
};

}  // namespace tilewise::cuda::wgmma
