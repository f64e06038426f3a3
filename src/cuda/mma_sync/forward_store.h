// The end of a forward block: normalise, write out and lse, or a partial result of a key split.
#pragma once

#include "cuda/mma_sync/forward_ring.h"
#include "cuda/mma_sync/forward_softmax.h"

namespace tilewise::cuda::mma_sync {

// Per row of a lane: what the output is multiplied by, and lse.
template <class C>
struct RowResults {
  float factor[C::kForward.warp_rows / 16][2];
  float lse[C::kForward.warp_rows / 16][2];
};

// Joins the sums of the quad and the sink. `weight` is the scale of kept weights.
template <class C>
TILEWISE_DEVICE RowResults<C> finish_rows(const ForwardParams& p, const BlockWork& work,
                                          const LanePlace<C>& place, RowSoftmax<C>& softmax,
                                          float weight) {
  const bool sinks = p.problem.sinks != nullptr && p.order.splits == 1;
  RowResults<C> result;
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = softmax.m[i][h];
      float l = tile::quad_sum(softmax.l[i][h]);
      float factor = weight;
      if (sinks) {
        const float sink = p.problem.sinks[work.head(place.row(i, h))] * kLog2e;
        const float highest = ptx::fmax(m, sink);
        const float shrink = ptx::ex2(m - highest);
        l = l * shrink + ptx::ex2(sink - highest);
        m = highest;
        factor *= shrink;
      }
      softmax.l[i][h] = l;
      result.factor[i][h] = l == 0.0f ? 0.0f : factor / l;
      result.lse[i][h] =
          l == 0.0f ? kMinusInfinity : m * static_cast<float>(kLn2) + ptx::log_accurate(l);
    }
  }
  return result;
}

// Whether all sums of the block are finite, for the second pass (params.h). `scratch` is shared
// memory that nobody uses any more.
template <class C>
TILEWISE_DEVICE void write_flag(uint8_t* flag, const Outputs<C>& o, const RowSoftmax<C>& softmax,
                                ptx::SharedAddress scratch) {
  float zero = 0.0f;  // NaN when it has met an infinity or a NaN
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
    zero = ptx::fma(softmax.l[i][0], 0.0f, ptx::fma(softmax.l[i][1], 0.0f, zero));
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = ptx::fma(o.x[i][n][e], 0.0f, zero);
    }
  }
  const bool bad = ptx::any(!(zero == 0.0f));
  ptx::sync_block();
  if (ptx::lane_index() == 0) ptx::st_shared_b32(scratch + ptx::warp_index() * 4, bad ? 1 : 0);
  ptx::sync_block();
  if (ptx::thread_index() != 0) return;
  uint32_t any = 0;
  for (int i = 0; i < C::kForward.warps; ++i) any |= ptx::ld_shared_b32(scratch + i * 4);
  *flag = any != 0 ? 1 : 0;
}

// fp32 results of one key split; a lane owns pairs of columns.
template <class C>
TILEWISE_DEVICE void store_partial(const ForwardParams& p, const BlockWork& work,
                                   const LanePlace<C>& place, const Outputs<C>& o,
                                   const RowResults<C>& result) {
  const int columns = static_cast<int>(p.problem.head_dim_v);
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(i, h);
      if (r >= work.rows.count) continue;
      const int64_t row = flat_row(p.problem, work.sequence, work.rows.first + work.rows.row(r));
      const int64_t index =
          (work.split * total_rows(p.problem) + row) * p.problem.heads_q + work.head(r);
      if (place.column == 0) p.partial_lse[index] = result.lse[i][h];
      float* out = p.partial_out + index * columns;
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + place.column + e;
          if (column < columns) out[column] = o.x[i][n][2 * h + e] * result.factor[i][h];
        }
      }
    }
  }
}

// A warp's rows of the output as elements into its own rows of the Q tile, which nobody reads any
// more, so that whole rows leave together.
template <class C>
TILEWISE_DEVICE void stage_outputs(ptx::SharedAddress q, const LanePlace<C>& place,
                                   const Outputs<C>& o, const RowResults<C>& result) {
  using Element = typename C::Element;
  using Swizzle = tile::Swizzle<C::kHeadDim * Element::kBytes>;
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(i, h);
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float low = o.x[i][n][2 * h] * result.factor[i][h];
        const float high = o.x[i][n][2 * h + 1] * result.factor[i][h];
        if constexpr (Element::kBytes == 2) {
          ptx::st_shared_b32(q + Swizzle::offset(r, n) + place.column * 2,
                             tile::pack<Element>(low, high));
        } else {
          const ptx::SharedAddress to =
              q + Swizzle::offset(r, 2 * n + place.column / 4) + place.column % 4 * 4;
          ptx::st_shared_b32(to, ptx::bits_of(low));
          ptx::st_shared_b32(to + 4, ptx::bits_of(high));
        }
      }
    }
  }
}

template <class C>
TILEWISE_DEVICE void store_outputs(const Problem& p, const BlockWork& work, ptx::SharedAddress q) {
  using Element = typename C::Element;
  constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  constexpr int kPerChunk = 16 / Element::kBytes;
  using Lanes = tile::CopyLanes<ptx::kWarpSize, C::kForward.warp_rows, kRowBytes>;
  const Lanes lanes(ptx::lane_index());
  const int columns = static_cast<int>(p.head_dim_v);
  const bool aligned = !C::kGeneral || rows_are_aligned<Element>(p.out, columns);
  const int row0 = ptx::warp_index() * C::kForward.warp_rows;
#pragma unroll 4
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int r = row0 + lanes.row_of(pass);
    if (!lanes.has(pass) || r >= work.rows.count) continue;
    char* out = static_cast<char*>(p.out.data) + work.offset(p.out, r) * Element::kBytes;
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
TILEWISE_DEVICE void store_lse(const Problem& p, const BlockWork& work, const LanePlace<C>& place,
                               const RowResults<C>& result) {
  if (p.lse == nullptr || place.column != 0) return;
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(i, h);
      if (r >= work.rows.count) continue;
      const int64_t row =
          work.sequence.lse_offset(p.lse_stride_batch, work.rows.first + work.rows.row(r));
      p.lse[row + work.head(r) * p.lse_stride_head] = result.lse[i][h];
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
