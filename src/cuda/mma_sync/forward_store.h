// Stores the output of a forward CTA as whole rows, through shared memory.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/mma_sync/forward_kv_pipeline.h"
#include "cuda/mma_sync/forward_softmax.h"

namespace tilewise::cuda::mma_sync {

// The addresses of a lane's sums in the Q tile, when that holds rows of out.
template <class C>
class OutputLane {
  static constexpr int kBytes = C::Element::kBytes;
  static constexpr int kRowBytes = C::kHeadDim * kBytes;
  static constexpr int kPeriod = tile::Swizzle<kRowBytes>::kPeriod;

 public:
  TILEWISE_DEVICE OutputLane(ptx::SharedAddress q, const LanePosition& position) {
    const int column = C::Columns::of_lane(position.column) * kBytes;
    first_ = q + tile::Swizzle<kRowBytes>::offset(position.row0, column / 16) + column % 16;
  }

  // Pair n of columns in row (i, h). Rows 8 apart have the same swizzle: one exclusive or per 16
  // bytes, immediates for the rest.
  TILEWISE_DEVICE ptx::SharedAddress at(int i, int h, int n) const {
    const int byte = C::Columns::of_tile(n) * kBytes;
    const int chunk = byte / 16;
    return (first_ ^ static_cast<uint32_t>(chunk % kPeriod * 16)) +
           static_cast<uint32_t>(chunk / kPeriod * kPeriod * 16 + byte % 16 +
                                 (16 * i + 8 * h) * kRowBytes);
  }

 private:
  ptx::SharedAddress first_;
};

// Writes a warp's output rows to its own rows of the Q tile, which is no longer read, so that whole
// rows can be stored together. Only the first `rows` rows of the tile exist, often few in a decode.
template <class C>
TILEWISE_DEVICE void stage_outputs(const Problem& p, int32_t rows, ptx::SharedAddress q,
                                   const LanePosition& position, const Outputs<C>& o,
                                   const RowResults<C::kForward.warp_rows / 16>& result) {
  using Element = typename C::Element;
  const OutputLane<C> lane(q, position);
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (C::kWarpPipeline && 8 * h >= rows) continue;
#pragma unroll
      for (int n = 0; n < C::kWarpColumns / 8; ++n) {
        const float low = o.x[i][n][2 * h] * result.factor[i][h];
        const float high = o.x[i][n][2 * h + 1] * result.factor[i][h];
        const ptx::SharedAddress to = lane.at(i, h, n);
        if constexpr (Element::kBytes == 2) {
          ptx::st_shared_b32(to, pack_output<C>(p, low, high));
        } else {
          ptx::st_shared_b32(to, ptx::bits_of(low));
          ptx::st_shared_b32(to + 4, ptx::bits_of(high));
        }
      }
    }
  }
}

// Stores the rows of the tile at `q` to `view`, which is out or has its layout.
template <class C>
TILEWISE_DEVICE void store_rows(const tilewise_tensor& view, int64_t head_dim_v,
                                const QueryTile& q_tile, ptx::SharedAddress q) {
  using Element = typename C::Element;
  constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  constexpr int kPerChunk = 16 / Element::kBytes;
  using Lanes = typename PackedRows<C>::Lanes;
  const int thread = opaque_thread<C>();
  const Lanes lanes(thread % kCopyThreads<C>);
  const int columns = static_cast<int>(head_dim_v);
  const int row0 = thread / kCopyThreads<C> * kCopyRows<C>;
  if (!C::kGeneral && !q_tile.rows.packed()) {
    const int32_t left = q_tile.rows.count - row0 - lanes.row;
    const int64_t step = Lanes::kRowsPerPass * view.stride_row * Element::kBytes;
    char* out = static_cast<char*>(view.data) +
                q_tile.offset_unpacked(view, row0 + lanes.row) * Element::kBytes + lanes.chunk * 16;
#pragma unroll
    for (int pass = 0; pass < Lanes::kPasses; ++pass) {
      if (!lanes.has(pass)) continue;
#pragma unroll
      for (int column = 0; column < Lanes::kColumns; ++column) {
        uint32_t x[4];
        ptx::ld_shared_v4_b32(x, q + row0 * kRowBytes + lanes.offset(pass, column));
        if (pass * Lanes::kRowsPerPass < left && lanes.chunk_of(column) * kPerChunk < columns)
          ptx::st_global_v4_b32(out + column * Lanes::kStride * 16, x);
      }
      out += step;
    }
    return;
  }
  using Rows = PackedRows<C>;
  const Rows rows(q_tile, view);
  const bool aligned = !C::kGeneral || rows_are_aligned<Element>(view, columns);
#pragma unroll Rows::kPassesInFlight
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int64_t offset = rows.offset(pass);
    if (!lanes.has(pass) || !rows.exists(pass)) continue;
    char* const out = static_cast<char*>(view.data) + offset;
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column) {
      const int chunk = lanes.chunk_of(column);
      const int count = min(kPerChunk, columns - chunk * kPerChunk);
      if (count <= 0) continue;
      uint32_t x[4];
      ptx::ld_shared_v4_b32(x, q + row0 * kRowBytes + lanes.offset(pass, column));
      if (aligned) {
        ptx::st_global_v4_b32(out + chunk * 16, x);
      } else {
        tile::store_elements<Element>(out + chunk * 16, x, count);
      }
    }
  }
}

template <class C>
TILEWISE_DEVICE void store_outputs(const Problem& p, const QueryTile& q_tile,
                                   ptx::SharedAddress q) {
  store_rows<C>(p.out, p.head_dim_v, q_tile, q);
}

}  // namespace tilewise::cuda::mma_sync
