// Loads keys and values by TMA: one lane issues the loads of a tile in a few instructions, where
// copies by all lanes spend a fourth of a step on addresses and copies.
#pragma once

#include <type_traits>

#include "cuda/mma_sync/forward_stage.h"
#include "cuda/mma_sync/forward_tma_coordinates.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/mbarrier.h"

namespace tilewise::cuda::mma_sync {

template <class C>
class TmaLoader {
 public:
  using Coordinates = std::conditional_t<C::kPaged, PagedCoordinates<C>, ContiguousCoordinates<C>>;
  using Tile = StageTile<C>;
  static constexpr int kArrivals = 1;  // at the full barrier of a stage, beside the bytes
  static constexpr int kBytes = Coordinates::kBytes;  // of shared memory
  static constexpr int kPrefetchSectors = 1;
  static constexpr int kPrefetchAt = Coordinates::kPrefetchAt;

  TILEWISE_DEVICE static void prepare(const TmaForwardParams& p) {
    ptx::prefetch_tensormap(p.k);
    ptx::prefetch_tensormap(p.v);
    ptx::prefetch_tensormap(p.k_tail);
    ptx::prefetch_tensormap(p.v_tail);
  }

  TILEWISE_DEVICE TmaLoader(const TmaForwardParams& p, const QueryTile& q_tile, int32_t last,
                            ptx::SharedAddress shared)
      : p_(p),
        coordinates_(p, q_tile, last, shared),
        head_(ptx::uniform(p.group.quotient(q_tile.rows.first_head))) {}

  TILEWISE_DEVICE void load(bool keys, int32_t tile, const Stage& stage) {
    coordinates_.visit(tile, expect(stage), copy(keys ? p_.k : p_.v, stage));
    if (!keys) coordinates_.advance(tile);
  }
  // Loads the tile that is read first. Rows past `first_tile_rows` are not written.
  TILEWISE_DEVICE void load_first(bool keys, int32_t tile, const Stage& stage) {
    coordinates_.visit_first(tile, expect(stage), copy(keys ? p_.k : p_.v, stage),
                             copy(keys ? p_.k_tail : p_.v_tail, stage));
    if (!keys) coordinates_.advance(tile);
  }
  TILEWISE_DEVICE int32_t first_tile_rows(int32_t tile) const {
    return coordinates_.first_tile_rows(tile);
  }
  TILEWISE_DEVICE bool pages_fit(const QueryTile&) const { return coordinates_.fit(); }

 private:
  static constexpr int kPanelColumns = tile::kSwizzledRowBytes / C::KvElement::kBytes;

  TILEWISE_DEVICE auto expect(const Stage& stage) const {
    return [stage](int32_t rows) {
      ptx::mbarrier_arrive_expect_tx(stage.barrier, rows * (Tile::kBytes / Tile::kRows));
    };
  }
  // Columns and rows outside of the tensor arrive as 0.
  TILEWISE_DEVICE auto copy(const TensorMap& map, const Stage& stage) const {
    return [this, &map, stage](int32_t begin, int32_t row, int32_t index) {
      const ptx::SharedAddress to =
          stage.at + static_cast<uint32_t>(begin * tile::kSwizzledRowBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::cp_async_bulk_tensor_load(to + panel * Tile::kPanelBytes, map, panel * kPanelColumns,
                                       row, head_, index, stage.barrier,
                                       ptx::CachePolicy::evict_normal);
    };
  }

  const TmaForwardParams& p_;
  Coordinates coordinates_;
  int32_t head_;
};

}  // namespace tilewise::cuda::mma_sync
