// The part of loading K and V that TMA cannot do (pages, and zeros in place of the rows of other
// sequences), and the stores of dK and dV by a warp that has 16 keys.
#pragma once

#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"
#include "cuda/wgmma/backward_consumer.h"
#include "cuda/wgmma/backward_producer.h"

namespace tilewise::cuda::wgmma {

// Columns [first, end) of a key tensor.
struct KeyColumns {
  const tilewise_tensor& view;
  int first;
  int64_t end;
};

// Copies the keys of `sequence` from `first` on to a tile, row by row, because pages are not
// contiguous. All consumer threads call it. Rows past the last key become 0.
template <class C, class Tile>
TILEWISE_DEVICE void copy_keys(ptx::SharedAddress to, const KeyColumns& columns, int head,
                               const Sequence& sequence, int32_t first, int thread) {
  using Storage = typename C::Element::Storage;
  constexpr int kChunks = Tile::kPanels * 8;
  const tilewise_tensor& view = columns.view;
#pragma unroll 1
  for (int i = thread; i < Tile::kRows * kChunks; i += BackwardPlan<C>::kConsumerThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const int column = columns.first + chunk * 8;
    const int64_t key = first + row;
    const bool in_use = key < sequence.band.keys && column < columns.end;
    const Storage* from = static_cast<const Storage*>(view.data) + head * view.stride_head;
    if (in_use) from += sequence.kv.offset(view, key) + column;
    ptx::cp_async_16(to + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)), from,
                     in_use ? 16 : 0);
  }
}

template <class C>
TILEWISE_DEVICE void copy_pages(const Problem& p, const TileDescriptor& work_tile,
                                ptx::SharedAddress shared, int thread) {
  using Plan = BackwardPlan<C>;
  const Sequence s = sequence_of(p, work_tile.batch);
  const KeyColumns k{p.k, 0, p.head_dim};
  const KeyColumns v{p.v, 0, p.head_dim_v};
  copy_keys<C, typename Plan::KTile>(shared + Plan::kK, k, work_tile.head, s, work_tile.key,
                                     thread);
  copy_keys<C, typename Plan::VTile>(shared + Plan::kV, v, work_tile.head, s, work_tile.key,
                                     thread);
  if constexpr (Plan::kCluster == 2) {
    const int rank = static_cast<int>(ptx::block_index() % Plan::kCluster);
    const KeyColumns peer_k{p.k, rank * (C::kHeadDim / 2), p.head_dim};
    const int32_t peer_key = work_tile.key + (rank == 0 ? Plan::kKeys : -Plan::kKeys);
    copy_keys<C, typename Plan::PeerKTile>(shared + Plan::kPeerK, peer_k, work_tile.head, s,
                                           peer_key, thread);
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

// Returns when K and V are ready for the products. `parity` is passed on to wait_for_kv.
template <class C>
TILEWISE_DEVICE void prepare_kv(const TmaBackwardParams& p, const TileDescriptor& work_tile,
                                ptx::SharedAddress shared, int thread, int parity) {
  using Plan = BackwardPlan<C>;
  wait_for_kv({shared + Plan::kBarriers}, parity);
  if (C::kGeneral && work_tile.paged != 0) {
    copy_pages<C>(p.problem, work_tile, shared, thread);
  } else {
    const int32_t valid_keys = work_tile.valid_keys;
    const int32_t peer_valid_keys = Plan::kCluster == 2 ? work_tile.peer_valid_keys : Plan::kKeys;
    if (valid_keys >= Plan::kKeys && peer_valid_keys >= Plan::kKeys) return;
    zero_rows<typename Plan::KTile>(shared + Plan::kK, valid_keys, thread, Plan::kConsumerThreads);
    zero_rows<typename Plan::VTile>(shared + Plan::kV, valid_keys, thread, Plan::kConsumerThreads);
    if constexpr (Plan::kCluster == 2)
      zero_rows<typename Plan::PeerKTile>(shared + Plan::kPeerK, peer_valid_keys, thread,
                                          Plan::kConsumerThreads);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(kKvReady, Plan::kConsumerThreads);
}

template <int kN>
TILEWISE_DEVICE bool all_finite(const float (&x)[kN]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kN; ++i) finite = finite && x[i] - x[i] == 0.0f;
  return finite;
}

// Stores scale * sums of the 16 keys of a warp to dk or dv, through a tile of its own in shared
// memory. `keys` of the 16 exist; `offset` is that of the first one.
template <class C, int kN>
TILEWISE_DEVICE void store_keys(const float (&sums)[kN], float scale, ptx::SharedAddress tile,
                                const tilewise_tensor& view, int64_t offset, int keys,
                                int64_t columns) {
  using Storage = typename C::Element::Storage;
  using Tile = tile::SwizzledTile<16, kN * 2>;
  if (view.data == nullptr) return;
  // `lane` is computed again for every work tile, so that no register holds values derived from it
  // during the steps of one.
  const int lane =
      static_cast<int>(ptx::opaque(static_cast<uint32_t>(ptx::thread_index()))) % ptx::kWarpSize;
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[e] = tile::pack<typename C::Element>(sums[8 * i + 2 * e] * scale,
                                             sums[8 * i + 2 * e + 1] * scale);
    ptx::stmatrix_x4(tile + static_cast<uint32_t>(Tile::chunk_offset(lane % 16, 2 * i + lane / 16)),
                     x);
  }
  ptx::sync_warp();
  constexpr int kChunks = kN / 4;  // per row
  Storage* const to = static_cast<Storage*>(view.data) + offset;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += ptx::kWarpSize) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    if (row >= keys || chunk * 8 >= columns) continue;
    uint32_t x[4];
    ptx::ld_shared_v4_b32(x, tile + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)));
    ptx::st_global_v4_b32(to + row * view.stride_row + chunk * 8, x);
  }
  ptx::sync_warp();
}

}  // namespace tilewise::cuda::wgmma
