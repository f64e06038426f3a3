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

  TILEWISE_DEVICE ForwardLoad(const TmaForwardParams& params, const Shared& shared)
      : p_(params), shared_(shared) {}

  TILEWISE_DEVICE void run() {
    // The key tile whose values are to come, and the slot of its work: they follow a step later.
    int32_t behind = kNone;
    typename Shared::WorkPlace place;
#pragma unroll 1
    for (;; place.next()) {
      const Work& work = shared_.work(place.slot());
      shared_.work_full(place.slot()).wait(place.phase());
      if (work.rows.count == 0) break;
      load_q(work, {place.count});
      int32_t tile = work.tiles.last;
#pragma unroll 1
      do {  // without keys: one step, in which the values that are behind come
        const bool wanted = tile >= work.tiles.first;
        if (wanted) load_k(work, tile);
        if (behind != kNone) load_v(behind, {ks_.count - (wanted ? 2u : 1u)});
        behind = wanted ? tile * Shared::kWorkSlots + place.slot() : kNone;
      } while (--tile >= work.tiles.first - (kOverlap ? 0 : 1));
      place.count = ptx::recent(place.count);  // few registers: see lane()
      if (!shared_.work(place.slot()).has_keys()) release(place.slot());
    }
    if (kOverlap && behind != kNone) load_v(behind, {ks_.count - 1});
  }

 private:
  static constexpr int32_t kNone = -1;

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
    if (work.rows.packed()) {
      copy_q(work, buffer);
      return announce_copies(full);
    }
    if (lane() != 0) return;
    const auto row = static_cast<int32_t>(work.sequence.first_row) + work.rows.first;
    full.expect(Shared::kQBytes);
#pragma unroll
    for (int warpgroup = 0; warpgroup < kTile.math_warpgroups; ++warpgroup)
      load_tile(shared_.q(buffer, warpgroup), full, p_.q, row + 64 * warpgroup,
                work.rows.first_head, static_cast<int32_t>(work.sequence.slot),
                ptx::CachePolicy::evict_first);
  }

  TILEWISE_DEVICE void load_k(const Work& work, int32_t tile) {
    const KTile to = shared_.k(ks_.slot());
    const Barrier full = shared_.k_full(ks_.slot());
    shared_.k_free(ks_.slot()).wait(ks_.phase() ^ 1);
    ks_.next();
    load_keys(to, full, full, p_.k, p_.problem.k, p_.problem.head_dim, work, tile);
  }

  TILEWISE_DEVICE void load_v(int32_t behind, typename Shared::KvPlace place) {
    const Work& work = shared_.work(behind % Shared::kWorkSlots);
    const int32_t tile = behind / Shared::kWorkSlots;
    const VTile to = shared_.v(place.slot());
    const Barrier full = shared_.v_full(place.slot());
    shared_.v_free(place.slot()).wait(place.phase() ^ 1);
    const bool tail = has_strangers(work, tile);
    const Barrier landed = tail ? shared_.v_landed() : full;
    load_keys(to, full, landed, p_.v, p_.problem.v, p_.problem.head_dim_v, work, tile);
    if (tail) {
      landed.wait(landed_phase_);
      landed_phase_ ^= 1;
      clear_rows(to, work.tiles.keys - tile * kTile.keys);
      ptx::fence_proxy_async();
      ptx::sync_warp();
      if (lane() == 0) full.arrive();
    }
    if (tile == work.tiles.first) release(behind % Shared::kWorkSlots);
  }

  // Whether rows behind the keys of the sequence come with its tile: a masked key has weight 0, and
  // 0 times the NaN of a stranger is NaN. Keys need no such care: masked scores are replaced.
  TILEWISE_DEVICE bool has_strangers(const Work& work, int32_t tile) const {
    const KvSource& kv = work.sequence.kv;
    return (tile + 1) * kTile.keys > work.tiles.keys && kv.pages == nullptr &&
           kv.first + work.tiles.keys != p_.problem.seqlen_k;
  }

  // One key tile of one head; `landed` counts the bytes.
  template <class Tile>
  TILEWISE_DEVICE void load_keys(const Tile& to, Barrier full, Barrier landed, const TensorMap& map,
                                 const tilewise_tensor& view, int64_t columns, const Work& work,
                                 int32_t tile) const {
    const KvSource& kv = work.sequence.kv;
    const int32_t head = p_.group.quotient(work.rows.first_head);
    if (kv.pages != nullptr) {
      copy_keys(to, view, columns, work, tile, head);
      return announce_copies(full);
    }
    if (lane() != 0) return;
    landed.expect(Tile::kBytes);
    load_tile(to, landed, map, static_cast<int32_t>(kv.first) + tile * kTile.keys, head,
              static_cast<int32_t>(kv.slot), ptx::CachePolicy::evict_last);
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

  // Keys of a paged cache.
  template <class Tile>
  TILEWISE_DEVICE void copy_keys(const Tile& to, const tilewise_tensor& view, int64_t columns,
                                 const Work& work, int32_t tile, int32_t head) const {
#pragma unroll 1
    for (int r = lane() / kLanesPerRow; r < kTile.keys; r += kRowsPerPass) {
      const int32_t key = tile * kTile.keys + r;
      const char* row = nullptr;
      if (key < work.tiles.keys) {
        const int64_t offset = work.sequence.kv.offset_32(view, key) + head * view.stride_head;
        row = static_cast<const char*>(view.data) + offset * C::Element::kBytes;
      }
      copy_row(to, r, row, static_cast<int>(columns));
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
