// The epilogue of a backward CTA: dK and dV are stored through shared memory.
#pragma once

#include "cuda/mma_sync/backward_key_tile.cuh"
#include "cuda/mma_sync/row_alignment.h"
#include "cuda/ptx/warp.h"
#include "cuda/tile/copy.h"
#include "cuda/tile/operands.h"

namespace tilewise::cuda::mma_sync {

template <class C>
using KeySums = tile::Sums<2, BackwardPlan<C>::kColumns / 8>;

template <class C>
TILEWISE_DEVICE bool is_finite(const KeySums<C>& d) {
  bool finite = true;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < BackwardPlan<C>::kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) finite = finite && d.x[m][n][e] - d.x[m][n][e] == 0.0f;
  return finite;
}

// Writes scale * d to shared memory as rows of elements. `row` and `column` are the first ones of
// the warp.
template <class C>
TILEWISE_DEVICE void stage_keys(const KeySums<C>& d, float scale, ptx::SharedAddress to, int row,
                                int column) {
  using Plan = BackwardPlan<C>;
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < Plan::kColumns / 8; ++n) {
        const float x = d.x[m][n][2 * half] * scale;
        const float y = d.x[m][n][2 * half + 1] * scale;
        const int byte = (column + 8 * n + lane % 4 * 2) * Plan::kBytes;
        const ptx::SharedAddress at = to + tile::Swizzle<Plan::kRowBytes>::offset(key, byte / 16) +
                                      static_cast<uint32_t>(byte % 16);
        if constexpr (Plan::kBytes == 2) {
          ptx::st_shared_b32(at, tile::pack<typename C::Element>(x, y));
        } else {
          ptx::st_shared_b32(at, ptx::bits_of(x));
          ptx::st_shared_b32(at + 4, ptx::bits_of(y));
        }
      }
    }
  }
}

// Presplits K and V of fp32 (tile::presplit) when they have arrived, since all warps split them in
// every step.
template <class C>
TILEWISE_DEVICE void presplit_keys(ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  if constexpr (std::is_same_v<typename C::Element, F32>) {
    static_assert(Plan::kV == Plan::kK + Plan::kKeyTileBytes);
    tile::wait<typename C::Arch, 0>();
    ptx::sync_block();
#pragma unroll 2
    for (int at = ptx::thread_index() * 16; at < 2 * Plan::kKeyTileBytes;
         at += Plan::kThreads * 16) {
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, shared + Plan::kK + at);
      for (uint32_t& word : x) word = tile::presplit(word);
      ptx::st_shared_v4_b32(shared + Plan::kK + at, x);
    }
  }
}

// Stores the staged rows of valid keys to dk or dv.
template <class C>
TILEWISE_DEVICE void store_keys(const tilewise_tensor& view, ptx::SharedAddress from,
                                const KvSource& source, int64_t head, Range keys, int64_t columns) {
  using Plan = BackwardPlan<C>;
  using Lanes = tile::CopyLanes<Plan::kThreads, Plan::kKeys, Plan::kRowBytes>;
  using Storage = typename C::Element::Storage;
  constexpr int kPerChunk = 16 / Plan::kBytes;
  if (view.data == nullptr) return;
  const Lanes lanes(ptx::thread_index());
  const bool aligned = !C::kGeneral || rows_are_aligned<typename C::Element>(view, columns);
#pragma unroll 4
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int64_t key = keys.begin + lanes.row_of(pass);
    if (!lanes.has(pass) || key >= keys.end) break;
    Storage* row =
        static_cast<Storage*>(view.data) + head * view.stride_head + source.offset(view, key);
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column) {
      const int at = lanes.chunk_of(column) * kPerChunk;
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, from + lanes.offset(pass, column));
      if (!C::kGeneral || aligned) {
        if (at < columns) ptx::st_global_v4_b32(row + at, x);
      } else {
        tile::store_elements<typename C::Element>(row + at, x, columns - at);
      }
    }
  }
}

// Stores the sums of the CTA to dk and dv, through the shared memory of K and V.
template <class C>
TILEWISE_DEVICE void write_dk_dv(const BackwardParams& p, const KeySums<C>& dk,
                                 const KeySums<C>& dv, ptx::SharedAddress shared) {
  using Plan = BackwardPlan<C>;
  // Computed again, so that no register holds it throughout the loop.
  const int warp = static_cast<int>(ptx::opaque(static_cast<uint32_t>(ptx::thread_index()))) / 32;
  const int row = warp / Plan::kTile.query_warps * 32;
  const int column = warp % Plan::kTile.query_warps * Plan::kColumns;
  if (p.key_flags.data != nullptr && ptx::any(!is_finite<C>(dk) || !is_finite<C>(dv)) &&
      ptx::lane_index() == 0) {
    p.key_flags.data[ptx::block_index()] = 1;
  }
  stage_keys<C>(dk, score_of(p.problem).scale, shared + Plan::kK, row, column);
  stage_keys<C>(dv, 1.0f, shared + Plan::kV, row, column);
  ptx::sync_block();
  const KeyTile<C> key_tile(shared);
  const Sequence s = sequence_of(p.problem, key_tile.sequence());
  const KvSource source = gradient_source(p.problem, s);
  store_keys<C>(p.gradients.dk, shared + Plan::kK, source, key_tile.head(), key_tile.keys(),
                p.problem.head_dim);
  store_keys<C>(p.gradients.dv, shared + Plan::kV, source, key_tile.head(), key_tile.keys(),
                p.problem.head_dim_v);
}

}  // namespace tilewise::cuda::mma_sync
