// transpose_values: writes the values of a float8 problem as TransposedValues. A CTA transposes the
// values of one key tile and head; a thread transposes blocks of 4 keys x 4 columns in registers.
#pragma once

#include "cuda/common/block.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/float8.h"
#include "cuda/wgmma/config.h"
#include "cuda/wgmma/transposed_values.h"

namespace tilewise::cuda::wgmma {

inline constexpr int kTransposeThreads = 256;

// A row of the transposed tile in shared memory, in words of 4 keys. The lanes of a warp write 8
// rows x 4 words; the odd length of a row puts these into 32 banks.
inline constexpr int kTransposeWords = TransposedValues::kTile / 4;
inline constexpr int kTransposeRowBytes = 4 * (kTransposeWords + 1);
template <class C>
inline constexpr int kTransposeSharedBytes = C::kHeadDimV * kTransposeRowBytes;

// Byte i of x[j] becomes byte j of x[i].
TILEWISE_DEVICE void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t low[2] = {ptx::prmt<0x5140>(x[0], x[1]), ptx::prmt<0x5140>(x[2], x[3])};
  const uint32_t high[2] = {ptx::prmt<0x7362>(x[0], x[1]), ptx::prmt<0x7362>(x[2], x[3])};
  x[0] = ptx::prmt<0x5410>(low[0], low[1]);
  x[1] = ptx::prmt<0x7632>(low[0], low[1]);
  x[2] = ptx::prmt<0x5410>(high[0], high[1]);
  x[3] = ptx::prmt<0x7632>(high[0], high[1]);
}

// Copies the tile whose first value is at `from` to shared memory, transposed. It has `keys` keys.
template <class C>
TILEWISE_DEVICE void load_transposed(const Problem& p, const uint8_t* from, int64_t keys,
                                     ptx::SharedAddress shared) {
  constexpr int kWarps = kTransposeThreads / ptx::kWarpSize;
  constexpr int kBlocks = kTransposeWords * C::kHeadDimV / 4;  // of 4 keys x 4 columns
  const int lane = ptx::lane_index();
#pragma unroll
  for (int i = 0; i < kBlocks / kTransposeThreads; ++i) {
    const int part = ptx::warp_index() + i * kWarps;  // 4 words x 8 blocks of columns
    const int word = part % (kTransposeWords / 4) * 4 + lane / 8;
    const int column = (part / (kTransposeWords / 4) * 8 + lane % 8) * 4;
    uint32_t x[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = word / 8 * 32 + tile::key_of_weight(word % 8 * 4 + j);
      if (key < keys && column < p.head_dim_v)
        x[j] = ptx::ld_global_b32(from + key * p.v.stride_row + column);
    }
    transpose_bytes(x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::st_shared_b32(
          shared + static_cast<uint32_t>((column + j) * kTransposeRowBytes + 4 * word), x[j]);
  }
}

// Copies the transposed tile to `to`, 16 bytes per thread at a time.
TILEWISE_DEVICE void store_transposed(const Problem& p, uint8_t* to, int64_t columns,
                                      ptx::SharedAddress shared) {
  constexpr int kChunks = TransposedValues::kTile / 16;
  const int chunk = ptx::thread_index() % kChunks;
#pragma unroll 1
  for (int row = ptx::thread_index() / kChunks; row < p.head_dim_v;
       row += kTransposeThreads / kChunks) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = ptx::ld_shared_b32(
          shared + static_cast<uint32_t>(row * kTransposeRowBytes + 16 * chunk + 4 * i));
    ptx::st_global_v4_b32(to + row * columns + 16 * chunk, x);
  }
}

template <class C>
TILEWISE_KERNEL(kTransposeThreads, 1)
void transpose_values(TILEWISE_PARAMETER TransposeParams params) {
  const Problem& p = params.problem;
  const TransposedValues values{p};
  const int64_t head = ptx::block_index() % p.heads_kv;
  const int64_t tile_of_all = ptx::block_index() / p.heads_kv;
  const int64_t batch = tile_of_all / values.tiles();
  const int64_t tile = tile_of_all % values.tiles();
  const int64_t sequence = values.sequence_of(batch, tile);
  const int64_t first = (tile - values.first_tile(sequence)) * TransposedValues::kTile;
  const SequenceKeys keys = sequence_keys(p, sequence);
  if (first < 0 || first >= keys.count) return;
  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  load_transposed<C>(p,
                     static_cast<const uint8_t*>(p.v.data) + keys.batch_index * p.v.stride_batch +
                         (keys.first + first) * p.v.stride_row + head * p.v.stride_head,
                     keys.count - first, shared);
  ptx::sync_block();
  uint8_t* const rows = params.to + (batch * p.heads_kv + head) * p.head_dim_v * values.columns();
  store_transposed(p, rows + tile * TransposedValues::kTile, values.columns(), shared);
}

}  // namespace tilewise::cuda::wgmma
