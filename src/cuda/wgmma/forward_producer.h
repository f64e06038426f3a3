// The producer role of the forward: one warp loads Q, K and V.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/forward_mask.h"
#include "cuda/wgmma/transposed_values.h"

namespace tilewise::cuda::wgmma {

// All lanes run this code with the same values; one elected lane issues the TMA loads.
template <class C>
class ForwardProducer {
 public:
  using Shared = ForwardShared<C>;
  using WorkTile = typename Shared::WorkTile;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  // Whether the first K tile of a work tile is loaded before the last V tile of the previous one.
  static constexpr bool kOverlap = kTile.overlap_tiles;
  // With two buffers, Q arrives while the products of the previous work tile still read theirs.
  // With one, K is loaded first and Q is prefetched to L2: without the prefetch the consumers
  // waited 1 us for Q from HBM.
  static constexpr bool kDoubleBuffersQ = kTile.q_buffers > 1;

  TILEWISE_DEVICE ForwardProducer(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  // Runs before the CTA's first barrier.
  TILEWISE_DEVICE void begin() const {
    if (!ptx::elect_one()) return;
    shared_.init_barriers();
    ptx::prefetch_tensormap(p_.q);
    ptx::prefetch_tensormap(p_.k);
    ptx::prefetch_tensormap(p_.v);
  }

  TILEWISE_DEVICE void run() {
    if constexpr (C::kMasked)
      run_masked();
    else
      run_all();
  }

 private:
  // Loads all key tiles of the work tiles.
  TILEWISE_DEVICE void run_all() {
    KvCoordinates pending{};  // whose V tile is still to be loaded: V is one step behind K
    int32_t pending_tile = kNone;
    typename Shared::TilePipeline state;
#pragma unroll 1
    for (;; state.next()) {
      const WorkTile& work_tile = shared_.work_tile(state.stage());
      shared_.tile_located(state.stage()).wait(state.phase());
      if (work_tile.rows.count == 0) break;
      if (kDoubleBuffersQ)
        load_q(work_tile, {state.count});
      else
        prefetch_q(work_tile);
      KvCoordinates keys = coordinates_of(work_tile, state.stage());
      const int32_t last = work_tile.tiles.last;
      int32_t tile = last;
#pragma unroll 1
      do {  // without keys: one step, which loads the pending V tile
        const bool has_keys = tile >= keys.first_tile;
        if (has_keys) load_k(keys, tile);
        if (!kDoubleBuffersQ && tile == last)
          load_q(shared_.work_tile(state.stage()), {state.count});
        if (pending_tile != kNone)
          load_v(pending, pending_tile, {k_state_.count - (has_keys ? 2u : 1u)});
        pending = keys;
        pending_tile = has_keys ? tile : kNone;
        advance_pages(keys, tile);
        // Without overlap one more step loads the last V tile before the next work tile.
      } while (--tile >= keys.first_tile - (kOverlap ? 0 : 1));
      if (last < keys.first_tile) release(state.stage());
    }
    if (kOverlap && pending_tile != kNone) load_v(pending, pending_tile, {k_state_.count - 1});
  }

  // Loads the key tiles that the mask shows, in the same order.
  TILEWISE_DEVICE void run_masked() {
    static_assert(kDoubleBuffersQ);
    VisibleKeys<C> visible(shared_);
    KvCoordinates pending{};
    int32_t pending_tile = kNone;
    typename Shared::TilePipeline state;
#pragma unroll 1
    for (;; state.next()) {
      const WorkTile& work_tile = shared_.work_tile(state.stage());
      shared_.tile_located(state.stage()).wait(state.phase());
      if (work_tile.rows.count == 0) break;
      load_q(work_tile, {state.count});
      const KvCoordinates keys = coordinates_of(work_tile, state.stage());
      bool has_keys = visible.any();
      if (!has_keys) release(state.stage());
#pragma unroll 1
      do {
        const int32_t tile = has_keys ? visible.take() : kNone;
        if (has_keys) load_k(keys, tile);
        if (pending_tile != kNone)
          load_v(pending, pending_tile, {k_state_.count - (has_keys ? 2u : 1u)});
        pending = keys;
        pending_tile = tile;
        has_keys = has_keys && visible.any();
        pending.first_tile = has_keys ? kNone : tile;  // load_v releases the work tile with it
      } while (has_keys || (!kOverlap && pending_tile != kNone));
    }
    if (kOverlap && pending_tile != kNone) load_v(pending, pending_tile, {k_state_.count - 1});
  }

  static constexpr int32_t kNone = -1;

  // Where key 0 lies in the transposed values.
  struct TransposedPlace {
    int32_t column;
    int32_t batch_index;
  };

  // Coordinates of the K and V loads of a work tile. They are kept in registers so that an empty
  // stage is refilled at once; looking them up only then made D128 7 % slower at 4k keys.
  struct KvCoordinates {
    int32_t tile_stage;
    int32_t first_tile;
    int32_t row;  // of key 0
    int32_t head;
    int32_t batch_index;  // kNone: the keys are in pages
    int32_t tail_tile;    // tiles from here on have rows past the end of the sequence
    // Lane i holds the page of TMA box i of the next tile, and of the tile after it, so that no
    // load waits for the block table.
    int32_t page;
    int32_t next_page;
    TransposedPlace values{};  // of float8
  };

  TILEWISE_DEVICE TransposedPlace transposed_place(const WorkTile& work_tile) const {
    const TransposedValues values{p_.problem};
    const int64_t b = work_tile.sequence.batch;
    return {static_cast<int32_t>(values.first_tile(b) * TransposedValues::kTile),
            values.packed() ? 0 : static_cast<int32_t>(b)};
  }

  // The last tile of a sequence may have rows past its end, which belong to another sequence. A
  // masked key has weight 0, but 0 times a NaN in its V row is NaN, so those rows of V have to be
  // zeroed. K needs no such care, because masked scores are replaced.
  TILEWISE_DEVICE KvCoordinates coordinates_of(const WorkTile& work_tile, int stage) const {
    const KvSource& kv = work_tile.sequence.kv;
    const bool paged = C::kGeneral && kv.pages != nullptr;
    const bool ends_tensor = !paged && kv.first + work_tile.tiles.keys == p_.problem.seqlen_k;
    const int32_t last = work_tile.tiles.last;
    if constexpr (C::kFloat8)  // transposed values are 0 past the end
      return {stage,
              work_tile.tiles.first,
              static_cast<int32_t>(kv.first),
              p_.group.quotient(work_tile.rows.first_head),
              static_cast<int32_t>(kv.batch_index),
              INT32_MAX,
              kOutOfBounds,
              kOutOfBounds,
              transposed_place(work_tile)};
    return {stage,
            work_tile.tiles.first,
            static_cast<int32_t>(kv.first),
            p_.group.quotient(work_tile.rows.first_head),
            paged ? kNone : static_cast<int32_t>(kv.batch_index),
            ends_tensor ? INT32_MAX : work_tile.tiles.keys / kTile.keys,
            paged ? page_of_lane(work_tile, last) : kOutOfBounds,
            paged ? page_of_lane(work_tile, last - 1) : kOutOfBounds};
  }

  // Called when K of `tile` has been requested.
  TILEWISE_DEVICE void advance_pages(KvCoordinates& keys, int32_t tile) const {
    if (!C::kGeneral || keys.batch_index != kNone) return;
    keys.page = keys.next_page;
    if (tile - 2 >= keys.first_tile)  // else this warp may have released the descriptor
      keys.next_page = page_of_lane(shared_.work_tile(keys.tile_stage), tile - 2);
  }

  // Only block table entries of keys in use are read.
  TILEWISE_DEVICE int32_t page_of_lane(const WorkTile& work_tile, int32_t tile) const {
    const int32_t key = tile * kTile.keys + lane() * p_.page_box_rows;
    if (tile < work_tile.tiles.first || key >= work_tile.tiles.keys) return kOutOfBounds;
    return static_cast<int32_t>(work_tile.sequence.kv.page(p_.page_size.quotient(key)));
  }

  // Reads the thread index again at each use, because a lane of this warp has few registers.
  TILEWISE_DEVICE static int lane() {
    return static_cast<int>(ptx::opaque(static_cast<uint32_t>(ptx::thread_index())) %
                            ptx::kWarpSize);
  }

  TILEWISE_DEVICE void release(int stage) const {
    ptx::sync_warp();
    if (lane() == 0) shared_.tile_empty(stage).arrive();
  }

  TILEWISE_DEVICE void load_q(const WorkTile& work_tile, typename Shared::QPipeline state) {
    const int buffer = state.stage();
    const Barrier full = shared_.q_full(buffer);
    shared_.q_empty(buffer).wait(state.phase() ^ 1);
    if (C::kGeneral && work_tile.rows.packed()) {
      copy_q(work_tile, buffer);
      return complete_copies(full);
    }
    if (!ptx::elect_one()) return;
    full.expect(Shared::kQBytes);
#pragma unroll
    for (int warpgroup = 0; warpgroup < kTile.consumer_warpgroups; ++warpgroup)
      load_tile(shared_.q(buffer, warpgroup), full, p_.q, row_of(work_tile) + 64 * warpgroup,
                work_tile.rows.first_head, static_cast<int32_t>(work_tile.sequence.batch_index),
                ptx::CachePolicy::evict_first);
  }

  TILEWISE_DEVICE static int32_t row_of(const WorkTile& work_tile) {
    return static_cast<int32_t>(work_tile.sequence.first_row) + work_tile.rows.first;
  }

  TILEWISE_DEVICE void prefetch_q(const WorkTile& work_tile) const {
    const int panel = lane() % QTile::kPanels;
    const int warpgroup = lane() / QTile::kPanels;
    if ((C::kGeneral && work_tile.rows.packed()) || warpgroup >= kTile.consumer_warpgroups) return;
    ptx::cp_async_bulk_prefetch_tensor(
        p_.q, panel * Shared::kBoxColumns, row_of(work_tile) + 64 * warpgroup,
        work_tile.rows.first_head, static_cast<int32_t>(work_tile.sequence.batch_index));
  }

  TILEWISE_DEVICE void load_k(const KvCoordinates& keys, int32_t tile) {
    const KTile to = shared_.k(k_state_.stage());
    const Barrier full = shared_.k_full(k_state_.stage());
    shared_.k_empty(k_state_.stage()).wait(k_state_.phase() ^ 1);
    k_state_.next();
    load_keys(to, full, p_.k, keys, tile);
  }

  TILEWISE_DEVICE void load_v(const KvCoordinates& keys, int32_t tile,
                              typename Shared::KvPipeline state) {
    const VTile to = shared_.v(state.stage());
    const Barrier full = shared_.v_full(state.stage());
    const bool in_tail = tile >= keys.tail_tile;
    shared_.v_empty(state.stage()).wait(state.phase() ^ 1);
    if constexpr (C::kFloat8)
      load_transposed(to, full, keys, tile);
    else
      load_keys(to, in_tail ? shared_.v_tail_full() : full, p_.v, keys, tile);
    if (in_tail) [[unlikely]] {
      shared_.v_tail_full().wait(tail_phase_);
      tail_phase_ ^= 1;
      clear_rows(to, shared_.work_tile(keys.tile_stage).tiles.keys - tile * kTile.keys);
      ptx::fence_proxy_async();
      ptx::sync_warp();
      if (lane() == 0) full.arrive();
    }
    if (tile == keys.first_tile) release(keys.tile_stage);
  }

  // Loads one key tile of one head. `full` counts the bytes.
  template <class Tile>
  TILEWISE_DEVICE void load_keys(const Tile& to, Barrier full, const TensorMap& map,
                                 const KvCoordinates& keys, int32_t tile) const {
    if (C::kGeneral && keys.batch_index == kNone) return load_pages(to, full, map, keys, tile);
    if (!ptx::elect_one()) return;
    full.expect(Tile::kBytes);
    load_tile(to, full, map, keys.row + tile * kTile.keys, keys.head, keys.batch_index,
              ptx::CachePolicy::evict_last);
  }

  // Loads the values of one key tile of one head, transposed.
  TILEWISE_DEVICE void load_transposed(const VTile& to, Barrier full, const KvCoordinates& keys,
                                       int32_t tile) const {
    static_assert(kTile.keys == TransposedValues::kTile && VTile::kPanels == 1);  // one box
    if (!ptx::elect_one()) return;
    full.expect(VTile::kBytes);
    ptx::cp_async_bulk_tensor_load(to.base, p_.v, keys.values.column + tile * kTile.keys, 0,
                                   keys.head, keys.values.batch_index, full.address,
                                   ptx::CachePolicy::evict_last);
  }

  // A TMA box has as many rows of a page as divide both the page and the tile.
  template <class Tile>
  TILEWISE_DEVICE void load_pages(const Tile& to, Barrier full, const TensorMap& map,
                                  const KvCoordinates& keys, int32_t tile) const {
    if (ptx::elect_one()) full.expect(Tile::kBytes);
    int32_t row = p_.page_size.remainder(tile * kTile.keys);
#pragma unroll 1
    for (int32_t begin = 0, box = 0; begin < kTile.keys; begin += p_.page_box_rows, ++box) {
      const auto page = static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.page), box));
      if (ptx::elect_one())
        load_tile(to.from_row(begin), full, map, row, keys.head, page,
                  ptx::CachePolicy::evict_last);
      row += p_.page_box_rows;
      if (row == p_.page_size) row = 0;
    }
  }

  // Columns and rows outside of the tensor arrive as 0.
  template <class Tile>
  TILEWISE_DEVICE static void load_tile(const Tile& to, Barrier full, const TensorMap& map,
                                        int32_t row, int32_t head, int32_t batch_index,
                                        ptx::CachePolicy policy) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      ptx::cp_async_bulk_tensor_load(to.base + panel * Tile::kPanelBytes, map,
                                     panel * Shared::kBoxColumns, row, head, batch_index,
                                     full.address, policy);
  }

  // --- rows that are not contiguous, which no TMA box describes ---

  static constexpr int kLanesPerRow = 8;
  static constexpr int kRowsPerPass = ptx::kWarpSize / kLanesPerRow;

  // Copies one row of a tile with eight lanes. If `from` is null, the row becomes 0.
  template <class Tile>
  TILEWISE_DEVICE void copy_row(const Tile& to, int row, const char* from, int columns) const {
#pragma unroll 1
    for (int chunk = lane() % kLanesPerRow; chunk < Tile::kPanels * 8; chunk += kLanesPerRow) {
      const bool exists = from != nullptr && chunk * 8 < columns;
      ptx::cp_async_16(to.base + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)),
                       exists ? from + chunk * 16 : static_cast<const char*>(p_.problem.q.data),
                       exists ? 16 : 0);
    }
  }

  // With packed heads, neighbouring rows of the tile are heads of one row.
  TILEWISE_DEVICE void copy_q(const WorkTile& work_tile, int buffer) const {
    const tilewise_tensor& q = p_.problem.q;
    const auto columns = static_cast<int>(p_.problem.head_dim);
#pragma unroll 1
    for (int r = lane() / kLanesPerRow; r < kTile.rows(); r += kRowsPerPass) {
      const char* row = nullptr;
      if (r < work_tile.rows.count)
        row = static_cast<const char*>(q.data) + work_tile.offset(q, r) * C::Element::kBytes;
      copy_row(shared_.q(buffer, r / 64), r % 64, row, columns);
    }
  }

  TILEWISE_DEVICE void complete_copies(Barrier full) const {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane() == 0) full.arrive();
  }

  // Zeroes the rows from `begin` on. A row takes 128 bytes in each panel; the swizzle, which
  // permutes these bytes, does not matter.
  template <class Tile>
  TILEWISE_DEVICE void clear_rows(const Tile& tile, int begin) const {
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const ptx::SharedAddress at = tile.base + static_cast<uint32_t>(panel * Tile::kPanelBytes);
#pragma unroll 1
      for (int i = begin * 8 + lane(); i < Tile::kRows * 8; i += ptx::kWarpSize)
        ptx::st_shared_v4_b32(at + static_cast<uint32_t>(i * 16), zeros);
    }
  }

  const TmaForwardParams& p_;
  Shared shared_;
  typename Shared::KvPipeline k_state_;
  int tail_phase_ = 0;
};

}  // namespace tilewise::cuda::wgmma
