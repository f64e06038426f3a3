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
  const bool sinks = p.problem.sinks != nullptr && work.splits == 1;
  RowResults<C> result;
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = softmax.m[i][h];
      float l = tile::quad_sum(softmax.l[i][h]);
      float factor = weight;
      if (sinks) [[unlikely]] {
        const float sink = p.problem.sinks[work.head(place.row(i, h))] * kLog2e;
        const float highest = ptx::fmax(m, sink);
        const float shrink = ptx::ex2(m - highest);
        l = l * shrink + ptx::ex2(sink - highest);
        m = highest;
        factor *= shrink;
      }
      softmax.l[i][h] = l;
      const float lse = C::Element::kBytes == 2
                            ? (m + ptx::lg2(l)) * static_cast<float>(kLn2)
                            : m * static_cast<float>(kLn2) + ptx::log_accurate(l);
      const float inverse = C::Element::kBytes == 2 ? factor * ptx::rcp_approximate(l) : factor / l;
      result.factor[i][h] = l == 0.0f ? 0.0f : inverse;
      result.lse[i][h] = l == 0.0f ? kMinusInfinity : lse;
    }
  }
  return result;
}

// Whether all sums of this lane are finite, for the second pass (params.h).
template <class C>
TILEWISE_DEVICE bool outputs_are_finite(const Outputs<C>& o, const RowSoftmax<C>& softmax) {
  float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // NaN when it has met an infinity or a NaN
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) zero[h] = ptx::fma(softmax.l[i][h], 0.0f, zero[h]);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero[e] = ptx::fma(o.x[i][n][e], 0.0f, zero[e]);
    }
  }
  return zero[0] + zero[1] + (zero[2] + zero[3]) == 0.0f;
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
      const int64_t row =
          partial_row(p.problem, p.pitch, work.sequence, work.rows.first + work.rows.row(r));
      const int64_t index =
          (work.split * partial_rows(p.problem, p.pitch) + row) * p.problem.heads_q + work.head(r);
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
  constexpr int kRowBytes = C::kHeadDim * Element::kBytes;
  constexpr int kPeriod = tile::Swizzle<kRowBytes>::kPeriod;
  // Rows 8 apart permute alike: an exclusive or per chunk, immediates for the rest.
  const int column = place.column * Element::kBytes;
  const ptx::SharedAddress lane =
      q + tile::Swizzle<kRowBytes>::offset(place.row0, column / 16) + column % 16;
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float low = o.x[i][n][2 * h] * result.factor[i][h];
        const float high = o.x[i][n][2 * h + 1] * result.factor[i][h];
        const int chunk = n * Element::kBytes / 2;
        const ptx::SharedAddress to =
            (lane ^ static_cast<uint32_t>(chunk % kPeriod * 16)) +
            static_cast<uint32_t>(chunk / kPeriod * kPeriod * 16 + (16 * i + 8 * h) * kRowBytes);
        if constexpr (Element::kBytes == 2) {
          ptx::st_shared_b32(to, tile::pack<Element>(low, high));
        } else {
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
  const int thread = recent_thread();
  const Lanes lanes(thread % ptx::kWarpSize);
  const int columns = static_cast<int>(p.head_dim_v);
  const int row0 = thread / ptx::kWarpSize * C::kForward.warp_rows;
  if (!C::kGeneral && !work.rows.packed()) {
    const int32_t left = work.rows.count - row0 - lanes.row;
    const int64_t step = Lanes::kRowsPerPass * p.out.stride_row * Element::kBytes;
    char* out = static_cast<char*>(p.out.data) +
                work.offset_unpacked(p.out, row0 + lanes.row) * Element::kBytes + lanes.chunk * 16;
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
  const bool aligned = !C::kGeneral || rows_are_aligned<Element>(p.out, columns);
#pragma unroll 1
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
  if (!work.rows.packed()) {
    const int32_t left = work.rows.count - place.row0;
    float* lse = p.lse + work.rows.first_head * p.lse_stride_head +
                 work.sequence.lse_offset(p.lse_stride_batch, work.rows.first + place.row0);
#pragma unroll
    for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (16 * i + 8 * h < left) lse[16 * i + 8 * h] = result.lse[i][h];
      }
    }
    return;
  }
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
