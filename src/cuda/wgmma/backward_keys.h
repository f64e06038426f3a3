// K and V of a block where TMA cannot bring them as they are to be, and dK and dV at its end.
#pragma once

#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"
#include "cuda/wgmma/backward_load.h"
#include "cuda/wgmma/backward_math.h"

namespace tilewise::cuda::wgmma {

// Columns of a tensor of keys: `first` of a row on, up to `end`.
struct KeyColumns {
  const tilewise_tensor& view;
  int first;
  int64_t end;
};

// A tile of keys row by row, by the math warpgroups: pages do not follow each other.
template <class C, class Tile>
TILEWISE_DEVICE void copy_keys(ptx::SharedAddress to, const KeyColumns& columns,
                               const KeyWork<C>& work, Range keys, int thread) {
  using Storage = typename C::Element::Storage;
  constexpr int kChunks = Tile::kPanels * 8;
  const tilewise_tensor& view = columns.view;
#pragma unroll 1
  for (int i = thread; i < Tile::kRows * kChunks; i += BackwardPlan<C>::kMathThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const int column = columns.first + chunk * 8;
    const int64_t key = keys.begin + row;
    const bool in_use = key < keys.end && column < columns.end;
    const Storage* from = static_cast<const Storage*>(view.data) + work.head * view.stride_head;
    if (in_use) from += work.sequence.kv.offset(view, key) + column;
    ptx::cp_async_16(to + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)), from,
                     in_use ? 16 : 0);
  }
}

// Returns when K and V are as the products need them.
template <class C>
TILEWISE_DEVICE void await_keys(const TmaBackwardParams& p, const KeyWork<C>& work,
                                ptx::SharedAddress shared, int thread) {
  using Plan = BackwardPlan<C>;
  using KTile = typename Plan::KTile;
  using VTile = typename Plan::VTile;
  const BackwardBarriers barriers{shared + Plan::kBarriers};
  const Problem& problem = p.problem;
  [[maybe_unused]] const Range peer_keys = work.part(work.rank ^ 1);
  if (work.sequence.kv.pages != nullptr) {
    const KeyColumns k{problem.k, 0, problem.head_dim};
    copy_keys<C, KTile>(shared + Plan::kK, k, work, work.keys, thread);
    const KeyColumns v{problem.v, 0, problem.head_dim_v};
    copy_keys<C, VTile>(shared + Plan::kV, v, work, work.keys, thread);
    if constexpr (Plan::kCluster == 2) {
      const KeyColumns own{problem.k, work.rank * (C::kHeadDim / 2), problem.head_dim};
      copy_keys<C, typename Plan::PeerKTile>(shared + Plan::kPeerK, own, work, peer_keys, thread);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  } else {
    ptx::mbarrier_wait_parity(barriers.k_landed(), 0);
    ptx::mbarrier_wait_parity(barriers.v_landed(), 0);
    const int32_t keep = work.keys_to_keep(problem, work.keys);
    int32_t peer_keep = Plan::kKeys;
    if constexpr (Plan::kCluster == 2) peer_keep = work.keys_to_keep(problem, peer_keys);
    if (keep >= Plan::kKeys && peer_keep >= Plan::kKeys) return;
    zero_rows<KTile>(shared + Plan::kK, keep, thread, Plan::kMathThreads);
    zero_rows<VTile>(shared + Plan::kV, keep, thread, Plan::kMathThreads);
    if constexpr (Plan::kCluster == 2)
      zero_rows<typename Plan::PeerKTile>(shared + Plan::kPeerK, peer_keep, thread,
                                          Plan::kMathThreads);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(kMath, Plan::kMathThreads);
}

template <int kN>
TILEWISE_DEVICE bool all_finite(const float (&x)[kN]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kN; ++i) finite = finite && x[i] - x[i] == 0.0f;
  return finite;
}

// scale * sums of the 16 keys of a warp: through its rows of a tile in shared memory to dk or dv.
// `first`: of these keys in the block.
template <class C, class Tile, int kN>
TILEWISE_DEVICE void store_keys(const float (&sums)[kN], float scale, ptx::SharedAddress tile,
                                const tilewise_tensor& view, const KeyWork<C>& work,
                                const KvSource& source, int first, int64_t columns) {
  using Storage = typename C::Element::Storage;
  if (view.data == nullptr) return;
  const int lane = ptx::lane_index();
  const int own_row = first + lane % 16;
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[e] = tile::pack<typename C::Element>(sums[8 * i + 2 * e] * scale,
                                             sums[8 * i + 2 * e + 1] * scale);
    ptx::stmatrix_x4(tile + static_cast<uint32_t>(Tile::chunk_offset(own_row, 2 * i + lane / 16)),
                     x);
  }
  ptx::sync_warp();
  constexpr int kChunks = kN / 4;  // of a row
#pragma unroll 4
  for (int i = lane; i < 16 * kChunks; i += ptx::kWarpSize) {
    const int row = first + i / kChunks;
    const int chunk = i % kChunks;
    const int64_t key = work.keys.begin + row;
    if (key >= work.keys.end || chunk * 8 >= columns) continue;
    uint32_t x[4];
    ptx::ld_shared_v4_b32(x, tile + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)));
    ptx::st_global_v4_b32(static_cast<Storage*>(view.data) + work.head * view.stride_head +
                              source.offset(view, key) + chunk * 8,
                          x);
  }
}

}  // namespace tilewise::cuda::wgmma
