// The query tile that a CTA of the prepare and finish kernels computes.
#pragma once

#include "cuda/ptx/block.h"
#include "cuda/wgmma/backward_sums.h"

namespace tilewise::cuda::wgmma {

inline constexpr int kRowThreads = 256;

// Heads vary fastest, because their rows are neighbours in memory. Grids have fewer than 2^31 CTAs,
// so 32 bits suffice for everything except the first row of a varlen sequence.
struct RowBlock {
  int32_t head;
  int32_t batch;  // -1: nothing to do
  int32_t row0;
  int32_t tile;  // among the tiles of all heads
  int32_t split;

  // `kSplits` CTAs share a tile.
  template <int kTile, int kSplits = 1>
  TILEWISE_DEVICE static RowBlock of(const Problem& p, int32_t first_block = 0) {
    constexpr PaddedRows kPadded{kTile};
    const auto block = static_cast<uint32_t>(ptx::block_index() - first_block);
    const auto heads = static_cast<uint32_t>(p.heads_q);
    const uint32_t position = block / heads;
    const uint32_t index = position / kSplits;
    RowBlock r;
    r.head = static_cast<int32_t>(block - position * heads);
    r.split = static_cast<int32_t>(position % kSplits);
    uint32_t tiles;  // per head
    if (p.cu_seqlens_q == nullptr) {
      const uint32_t tiles_of_sequence = (static_cast<uint32_t>(p.seqlen_q) + kTile - 1) / kTile;
      tiles = tiles_of_sequence * static_cast<uint32_t>(p.batch);
      const uint32_t batch = index / tiles_of_sequence;
      r.batch = static_cast<int32_t>(batch);
      r.row0 = static_cast<int32_t>((index - batch * tiles_of_sequence) * kTile);
    } else {
      tiles = static_cast<uint32_t>(kPadded.count(p) / kTile);
      const PaddedRows::TileStart found = kPadded.locate(p, index);
      r.batch = static_cast<int32_t>(found.batch);
      r.row0 = static_cast<int32_t>(found.row0);
    }
    r.tile = static_cast<int32_t>(static_cast<uint32_t>(r.head) * tiles + index);
    return r;
  }
};

}  // namespace tilewise::cuda::wgmma
