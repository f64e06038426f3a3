// The end of a forward: sums become rows of out and lse, or a partial result of a key split. The
// rows of a warp are tile::Sums: of mma and of wgmma alike.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/forward_terms.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda {

// Per row of a lane: what the output is multiplied by, and lse.
template <int kRows>
struct RowResults {
  float factor[kRows][2];
  float lse[kRows][2];
};

// Joins a sink to the sums of a row, m in units of log2: what they shrink by.
TILEWISE_DEVICE float join_sink(float sink, float& m, float& l) {
  const float of_sink = sink * kLog2e;
  const float highest = ptx::fmax(m, of_sink);
  const float shrink = ptx::ex2(m - highest);
  l = l * shrink + ptx::ex2(above(of_sink, highest));
  m = highest;
  return shrink;
}

// Joins the sums of the quad and the sink. `weight` is the scale of kept weights.
template <class Element, int kRows>
TILEWISE_DEVICE RowResults<kRows> finish_rows(const ForwardParams& p, const BlockWork& work,
                                              const LanePlace& place,
                                              const float (&row_m)[kRows][2],
                                              float (&row_l)[kRows][2], float weight) {
  const bool sinks = p.problem.sinks != nullptr && work.splits == 1;
  RowResults<kRows> result;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = row_m[i][h];
      float l = tile::quad_sum(row_l[i][h]);
      float factor = weight;
      if (sinks) [[unlikely]]
        factor *= join_sink(p.problem.sinks[work.head(place.row(i, h))], m, l);
      row_l[i][h] = l;
      const float lse = Element::kBytes == 2 ? (m + ptx::lg2(l)) * static_cast<float>(kLn2)
                                             : m * static_cast<float>(kLn2) + ptx::log_accurate(l);
      const float inverse = Element::kBytes == 2 ? factor * ptx::rcp_approximate(l) : factor / l;
      result.factor[i][h] = l == 0.0f ? 0.0f : inverse;
      result.lse[i][h] = l == 0.0f ? kMinusInfinity : lse;
    }
  }
  return result;
}

// Whether all sums of this lane's rows are finite: whether no stranger's NaN has spoilt them.
template <int kRows, int kColumns>
TILEWISE_DEVICE bool outputs_are_finite(const BlockWork& work, const LanePlace& place,
                                        const tile::Sums<kRows, kColumns>& o,
                                        const float (&row_l)[kRows][2]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float zero[2] = {row_l[i][h] * 0.0f, 0.0f};  // NaN when it has met an infinity or a NaN
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) zero[e] = ptx::fma(o.x[i][n][2 * h + e], 0.0f, zero[e]);
      }
      finite &= place.row(i, h) >= work.rows.count || zero[0] + zero[1] == 0.0f;
    }
  }
  return finite;
}

// Where the partial result of row r starts in partial_lse, and, times head_dim_v, in partial_out.
TILEWISE_DEVICE int64_t partial_index(const ForwardParams& p, const BlockWork& work, int32_t r) {
  if (p.parts.any()) return place_of_part(p, work) * p.packed_rows + r;
  const int64_t row =
      partial_row(p.problem, p.pitch, work.sequence, work.rows.first + work.rows.row(r));
  return (work.split * partial_rows(p.problem, p.pitch) + row) * p.problem.heads_q + work.head(r);
}

// fp32 results of one key split; a lane owns pairs of columns, which leave together where rows have
// even lengths (`kEven`).
template <bool kEven = false, class Columns = tile::TwoColumns, int kRows, int kColumns>
TILEWISE_DEVICE void store_partial(const ForwardParams& p, const BlockWork& work,
                                   const LanePlace& place, const tile::Sums<kRows, kColumns>& o,
                                   const RowResults<kRows>& result) {
  const int columns = static_cast<int>(p.problem.head_dim_v);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(i, h);
      if (r >= work.rows.count) continue;
      const int64_t index = partial_index(p, work, r);
      if (place.column == 0) p.partial_lse[index] = result.lse[i][h];
      float* out = p.partial_out + index * columns;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int column = Columns::of_tile(n) + Columns::of_lane(place.column);
        const float low = o.x[i][n][2 * h] * result.factor[i][h];
        const float high = o.x[i][n][2 * h + 1] * result.factor[i][h];
        if constexpr (kEven) {
          const uint32_t pair[2] = {ptx::bits_of(low), ptx::bits_of(high)};
          if (column < columns) ptx::st_global_v2_b32(out + column, pair);
        } else {
          if (column < columns) out[column] = low;
          if (column + 1 < columns) out[column + 1] = high;
        }
      }
    }
  }
}

// Of packed row r.
TILEWISE_DEVICE float* lse_place(const Problem& p, const BlockWork& work, int32_t r) {
  const int64_t row =
      work.sequence.lse_offset(p.lse_stride_batch, work.rows.first + work.rows.row(r));
  return p.lse + row + work.head(r) * p.lse_stride_head;
}

template <int kRows>
TILEWISE_DEVICE void store_lse(const Problem& p, const BlockWork& work, const LanePlace& place,
                               const RowResults<kRows>& result) {
  if (p.lse == nullptr || place.column != 0) return;
  if (!work.rows.packed()) {
    const int32_t left = work.rows.count - place.row0;
    float* lse = p.lse + work.rows.first_head * p.lse_stride_head +
                 work.sequence.lse_offset(p.lse_stride_batch, work.rows.first + place.row0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (16 * i + 8 * h < left) lse[16 * i + 8 * h] = result.lse[i][h];
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = place.row(i, h);
      if (r < work.rows.count) *lse_place(p, work, r) = result.lse[i][h];
    }
  }
}

}  // namespace tilewise::cuda
