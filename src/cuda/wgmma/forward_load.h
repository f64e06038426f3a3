// The loading role of the forward: one warp brings Q, K and V.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/wgmma/forward_shared.h"

namespace tilewise::cuda::wgmma {

// All lanes run it and agree; lane 0 starts the bulk copies.
template <class C>
class ForwardLoad {
 public:
  using Shared = ForwardShared<C>;
  using Work = typename Shared::Work;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  static constexpr arch::WgmmaForwardTile kTile = C::kForward;
  // Then the keys of a tile of queries come before the last values of the one before it.
  static constexpr bool kOverlap = kTile.overlap_tiles;
  // Q comes while the products of the work before still read theirs. Otherwise its keys come first,
  // and Q from L2: from memory they waited a microsecond for it.
  static constexpr bool kQAhead = kTile.q_buffers > 1;

  TILEWISE_DEVICE ForwardLoad(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  // Before the barrier of the block.
  TILEWISE_DEVICE void begin() const {
    if (!ptx::elect_one()) return;
    shared_.init_barriers();
    ptx::prefetch_tensormap(p_.q);
    ptx::prefetch_tensormap(p_.k);
    ptx::prefetch_tensormap(p_.v);
  }

  TILEWISE_DEVICE void run() {
    Keys behind{};  // whose values are to come: they follow a step later
    int32_t behind_tile = kNone;
    typename Shared::WorkPlace place;
#pragma unroll 1
    for (;; place.next()) {
      const Work& work = shared_.work(place.slot());
      shared_.work_located(place.slot()).wait(place.phase());
      if (work.rows.count == 0) break;
      if (kQAhead)
        load_q(work, {place.count});
      else
        prefetch_q(work);
      Keys keys = keys_of(work, place.slot());
      const int32_t last = work.tiles.last;
      int32_t tile = last;
#pragma unroll 1
      do {  // without keys: one step, in which the values that are behind come
        const bool wanted = tile >= keys.first_tile;
        if (wanted) load_k(keys, tile);
        if (!kQAhead && tile == last) load_q(shared_.work(place.slot()), {place.count});
        if (behind_tile != kNone) load_v(behind, behind_tile, {ks_.count - (wanted ? 2u : 1u)});
        behind = keys;
        behind_tile = wanted ? tile : kNone;
        pass(keys, tile);
      } while (--tile >= keys.first_tile - (kOverlap ? 0 : 1));
      if (last < keys.first_tile) release(place.slot());
    }
    if (kOverlap && behind_tile != kNone) load_v(behind, behind_tile, {ks_.count - 1});
  }

 private:
  static constexpr int32_t kNone = -1;

  // What the copies of a work's keys and values take, in registers: a slot that has become free is
  // refilled at once. Looked up only then, D128 took 7 % longer at 4k keys.
  struct Keys {
    int32_t work;  // slot
    int32_t first_tile;
    int32_t row;  // of key 0
    int32_t head;
    int32_t slot;          // kNone: pages
    int32_t foreign_tile;  // from here on tiles have rows behind the keys of the sequence
    // Lane i has the page of box i of the tile to be asked for, and of the tile after it: no copy
    // waits for the block table.
    int32_t page;
    int32_t next_page;
  };

  // Rows behind the keys of a sequence come with its last tile: a masked key has weight 0, and 0
  // times the NaN of a stranger is NaN. Keys need no such care: masked scores are replaced.
  TILEWISE_DEVICE Keys keys_of(const Work& work, int slot) const {
    const KvSource& kv = work.sequence.kv;
    const bool paged = C::kGeneral && kv.pages != nullptr;
    const bool alone = !paged && kv.first + work.tiles.keys == p_.problem.seqlen_k;
    const int32_t last = work.tiles.last;
    return {slot,
            work.tiles.first,
            static_cast<int32_t>(kv.first),
            p_.group.quotient(work.rows.first_head),
            paged ? kNone : static_cast<int32_t>(kv.batch_index),
            alone ? INT32_MAX : work.tiles.keys / kTile.keys,
            paged ? page_of_lane(work, last) : kOutOfBounds,
            paged ? page_of_lane(work, last - 1) : kOutOfBounds};
  }

  // Keys of `tile` have been asked for.
  TILEWISE_DEVICE void pass(Keys& keys, int32_t tile) const {
    if (!C::kGeneral || keys.slot != kNone) return;
    keys.page = keys.next_page;
    if (tile - 2 >= keys.first_tile)  // else the record may have been given back
      keys.next_page = page_of_lane(shared_.work(keys.work), tile - 2);
  }

  // Entries of no key in use are not looked up.
  TILEWISE_DEVICE int32_t page_of_lane(const Work& work, int32_t tile) const {
    const int32_t key = tile * kTile.keys + lane() * p_.page_box_rows;
    if (tile < work.tiles.first || key >= work.tiles.keys) return kOutOfBounds;
    return static_cast<int32_t>(work.sequence.kv.page(p_.page_size.quotient(key)));
  }

  // Read again where it is asked for: a lane of this warp has few registers.
  TILEWISE_DEVICE static int lane() {
    return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index())) %
                            ptx::kWarpSize);
  }

  TILEWISE_DEVICE void release(int slot) const {
    ptx::sync_warp();
    if (lane() == 0) shared_.work_free(slot).arrive();
  }

  TILEWISE_DEVICE void load_q(const Work& work, typename Shared::QPlace place) {
    const int buffer = place.slot();
    const Barrier full = shared_.q_full(buffer);
    shared_.q_free(buffer).wait(place.phase() ^ 1);
    if (C::kGeneral && work.rows.packed()) {
      copy_q(work, buffer);
      return announce_copies(full);
    }
    if (!ptx::elect_one()) return;
    full.expect(Shared::kQBytes);
#pragma unroll
    for (int warpgroup = 0; warpgroup < kTile.math_warpgroups; ++warpgroup)
      load_tile(shared_.q(buffer, warpgroup), full, p_.q, row_of(work) + 64 * warpgroup,
                work.rows.first_head, static_cast<int32_t>(work.sequence.batch_index),
                ptx::CachePolicy::evict_first);
  }

  TILEWISE_DEVICE static int32_t row_of(const Work& work) {
    return static_cast<int32_t>(work.sequence.first_row) + work.rows.first;
  }

  TILEWISE_DEVICE void prefetch_q(const Work& work) const {
    const int panel = lane() % QTile::kPanels;
    const int warpgroup = lane() / QTile::kPanels;
    if ((C::kGeneral && work.rows.packed()) || warpgroup >= kTile.math_warpgroups) return;
    ptx::cp_async_bulk_prefetch_tensor(p_.q, panel * tile::kPanelColumns,
                                       row_of(work) + 64 * warpgroup, work.rows.first_head,
                                       static_cast<int32_t>(work.sequence.batch_index));
  }

  TILEWISE_DEVICE void load_k(const Keys& keys, int32_t tile) {
    const KTile to = shared_.k(ks_.slot());
    const Barrier full = shared_.k_full(ks_.slot());
    shared_.k_free(ks_.slot()).wait(ks_.phase() ^ 1);
    ks_.next();
    load_keys(to, full, p_.k, keys, tile);
  }

  TILEWISE_DEVICE void load_v(const Keys& keys, int32_t tile, typename Shared::KvPlace place) {
    const VTile to = shared_.v(place.slot());
    const Barrier full = shared_.v_full(place.slot());
    const bool foreign = tile >= keys.foreign_tile;
    shared_.v_free(place.slot()).wait(place.phase() ^ 1);
    load_keys(to, foreign ? shared_.v_landed() : full, p_.v, keys, tile);
    if (foreign) [[unlikely]] {
      shared_.v_landed().wait(landed_phase_);
      landed_phase_ ^= 1;
      clear_rows(to, shared_.work(keys.work).tiles.keys - tile * kTile.keys);
      ptx::fence_proxy_async();
      ptx::sync_warp();
      if (lane() == 0) full.arrive();
    }
    if (tile == keys.first_tile) release(keys.work);
  }

  // One key tile of one head; `landed` counts the bytes.
  template <class Tile>
  TILEWISE_DEVICE void load_keys(const Tile& to, Barrier landed, const TensorMap& map,
                                 const Keys& keys, int32_t tile) const {
    if (C::kGeneral && keys.slot == kNone) return load_pages(to, landed, map, keys, tile);
    if (!ptx::elect_one()) return;
    landed.expect(Tile::kBytes);
    load_tile(to, landed, map, keys.row + tile * kTile.keys, keys.head, keys.slot,
              ptx::CachePolicy::evict_last);
  }

  // A box is as many rows of a page as divide it and the tile.
  template <class Tile>
  TILEWISE_DEVICE void load_pages(const Tile& to, Barrier landed, const TensorMap& map,
                                  const Keys& keys, int32_t tile) const {
    if (ptx::elect_one()) landed.expect(Tile::kBytes);
    int32_t row = p_.page_size.remainder(tile * kTile.keys);
#pragma unroll 1
    for (int32_t begin = 0, box = 0; begin < kTile.keys; begin += p_.page_box_rows, ++box) {
      const auto page = static_cast<int32_t>(ptx::shuffle(static_cast<uint32_t>(keys.page), box));
      if (ptx::elect_one())
        load_tile(to.from_row(begin), landed, map, row, keys.head, page,
                  ptx::CachePolicy::evict_last);
      row += p_.page_box_rows;
      if (row == p_.page_size) row = 0;
    }
  }

  // Columns and rows that the tensor does not have arrive as 0.
  template <class Tile>
  TILEWISE_DEVICE static void load_tile(const Tile& to, Barrier full, const TensorMap& map,
                                        int32_t row, int32_t head, int32_t slot,
                                        ptx::CachePolicy policy) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      ptx::cp_async_bulk_tensor_load(to.base + panel * Tile::kPanelBytes, map,
                                     panel * tile::kPanelColumns, row, head, slot, full.address,
                                     policy);
  }

  // --- what no box describes: rows that lie apart ---

  static constexpr int kLanesPerRow = 8;
  static constexpr int kRowsPerPass = ptx::kWarpSize / kLanesPerRow;

  // One row of a tile, by eight lanes; null: a row of zeros.
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

  // Packed heads: neighbouring rows of the tile are heads of one row.
  TILEWISE_DEVICE void copy_q(const Work& work, int buffer) const {
    const tilewise_tensor& q = p_.problem.q;
    const auto columns = static_cast<int>(p_.problem.head_dim);
#pragma unroll 1
    for (int r = lane() / kLanesPerRow; r < kTile.rows(); r += kRowsPerPass) {
      const char* row = nullptr;
      if (r < work.rows.count)
        row = static_cast<const char*>(q.data) + work.offset(q, r) * C::Element::kBytes;
      copy_row(shared_.q(buffer, r / 64), r % 64, row, columns);
    }
  }

  TILEWISE_DEVICE void announce_copies(Barrier full) const {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane() == 0) full.arrive();
  }

  // Rows from `begin` on become 0: a row is 128 bytes in each panel, in whatever order.
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
  typename Shared::KvPlace ks_;
  int landed_phase_ = 0;
};

}  // namespace tilewise::cuda::wgmma
