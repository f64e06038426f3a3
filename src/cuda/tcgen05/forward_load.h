// The load role of the forward: one warp loads Q, and K and V one key tile at a time.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/shared.h"
#include "cuda/tcgen05/forward_shared.h"

namespace tilewise::cuda::tcgen05 {

// All lanes run this code with the same values; one elected lane issues the TMA loads.
template <class C>
class ForwardLoad {
 public:
  using Shared = ForwardShared<C>;
  using Tile = typename Shared::Tile;

  TILEWISE_DEVICE ForwardLoad(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  TILEWISE_DEVICE void run() {
    const QueryTile& work_tile = shared_.work_tile();
    const KvSource& kv = work_tile.sequence.kv;
    const int32_t keys = work_tile.tiles.keys;
    const bool ends_tensor = kv.first + keys == p_.problem.seqlen_k;
    first_key_ = static_cast<int32_t>(kv.first);
    head_ = p_.group.quotient(work_tile.rows.first_head);
    batch_index_ = static_cast<int32_t>(kv.batch_index);
    const int32_t last = work_tile.tiles.last;
    load_q(0);
#pragma unroll 1
    for (int32_t tile = last; tile >= work_tile.tiles.first; --tile) {
      shared_.kv_empty(state_.stage()).wait(state_.phase() ^ 1);
      load_keys(p_.k, tile, shared_.kv_full(state_.stage()));
      state_.next();
      if (tile == last) load_q(1);
      shared_.kv_empty(state_.stage()).wait(state_.phase() ^ 1);
      load_v(tile, ends_tensor ? Shared::kRows : keys - tile * Shared::kRows);
      state_.next();
    }
  }

 private:
  // Rows past the end of the tensor arrive as 0; those of another sequence are computed in vain.
  TILEWISE_DEVICE void load_q(int t) const {
    const QueryTile& work_tile = shared_.work_tile();
    const auto row = static_cast<int32_t>(work_tile.sequence.first_row) + work_tile.rows.first;
    load_tile(shared_.q(t), shared_.q_full(t), p_.q, row + t * Shared::kRows,
              work_tile.rows.first_head, static_cast<int32_t>(work_tile.sequence.batch_index),
              ptx::CachePolicy::evict_first);
  }

  TILEWISE_DEVICE void load_keys(const TensorMap& map, int32_t tile, Barrier full) const {
    load_tile(shared_.kv(state_.stage()), full, map, first_key_ + tile * Shared::kRows, head_,
              batch_index_, ptx::CachePolicy::evict_last);
  }

  // The last tile of a sequence may have rows past its end, which belong to another sequence. A
  // masked key has weight 0, but 0 times a NaN in its V row is NaN, so those rows are zeroed.
  // `rows`: of the sequence, from the tile's first one on.
  TILEWISE_DEVICE void load_v(int32_t tile, int32_t rows) const {
    const Barrier full = shared_.kv_full(state_.stage());
    if (rows >= Shared::kRows) [[likely]]
      return load_keys(p_.v, tile, full);
    load_keys(p_.v, tile, shared_.v_tail_full());
    shared_.v_tail_full().wait(0);  // a work tile has one such tile
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const ptx::SharedAddress to =
          shared_.kv(state_.stage()).base + static_cast<uint32_t>(panel * Tile::kPanelBytes);
#pragma unroll 1
      for (int i = rows * 8 + ptx::lane_index(); i < Shared::kRows * 8; i += ptx::kWarpSize)
        ptx::st_shared_v4_b32(to + static_cast<uint32_t>(i * 16), zeros);
    }
    ptx::fence_proxy_async();
    full.arrive_as_warp();
  }

  TILEWISE_DEVICE static void load_tile(const Tile& to, Barrier full, const TensorMap& map,
                                        int32_t row, int32_t head, int32_t batch_index,
                                        ptx::CachePolicy policy) {
    if (!ptx::elect_one()) return;
    full.expect(Tile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      ptx::cp_async_bulk_tensor_load(to.base + static_cast<uint32_t>(panel * Tile::kPanelBytes),
                                     map, panel * tile::kPanelColumns, row, head, batch_index,
                                     full.address, policy);
  }

  const TmaForwardParams& p_;
  const Shared& shared_;
  typename Shared::Pipeline state_;
  int32_t first_key_ = 0;
  int32_t head_ = 0;
  int32_t batch_index_ = 0;
};

}  // namespace tilewise::cuda::tcgen05
