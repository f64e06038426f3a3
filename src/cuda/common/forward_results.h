// The epilogue of a forward: sums become rows of out and lse, or the partial result of a split. The
// sums of a warp are tile::Sums, for mma.sync and for wgmma.
#pragma once

#include <cfloat>

#include "attention/online_softmax.h"
#include "cuda/common/combine_weights.h"
#include "cuda/common/forward_score_mod.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda {

// For each row of a lane: the factor of the output, lse, and the remainder that the rounding of lse
// to fp32 left, which is computed only if the caller wants it (Problem::lse_low).
template <int kRows>
struct RowResults {
  float factor[kRows][2];
  float lse[kRows][2];
  float low[kRows][2];

  // The results of a sequence with invalid index entries.
  TILEWISE_DEVICE void set_to_nan() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[i][h] = lse[i][h] = ptx::float_of(0x7fc00000u);
        low[i][h] = 0.0f;
      }
    }
  }
};

// The magnitude of the scale, but never 0, so that -inf times the result stays -inf.
TILEWISE_DEVICE float positive_scale(float scale) {
  return scale == 0.0f ? FLT_MIN : scale < 0.0f ? -scale : scale;
}

// Above these |m| the rounding of an exponent to fp32 matters, and the row must be recomputed
// (`needs_recompute`).
inline constexpr float kMaxExponentWithBias = 0x1p24f;
inline constexpr float kMaxExponent = 0x1p12f;
// Above this l its reciprocal is subnormal.
inline constexpr float kOverflow = 0x1p126f;

// The exponent x for use as the m of a row. If |x| is beyond kMaxExponentWithBias, the result is
// larger than the exact exponent that was rounded to x: then no weight exceeds 2, and the sums of
// such a row stay finite until m is raised.
TILEWISE_DEVICE float round_exponent_up(float x) {
  return ptx::fmax(x, ptx::fma(__builtin_fabsf(x), 4.0f / kMaxExponentWithBias, x - 4.0f));
}

// The m of a row whose scores so far were all -inf.
inline constexpr float kNoKey = -FLT_MAX;

// `exponent` is the exponent of `top`, the largest score of some keys, and may have overflowed to
// -inf although the score is finite. The result is then the second lowest finite number of fp32, so
// that the m of such a row differs from kNoKey.
TILEWISE_DEVICE float clamp_exponent(float top, float exponent) {
  constexpr float kMinExponent = -0x1.fffffcp127f;
  return top > kMinusInfinity ? ptx::fmax(exponent, kMinExponent) : exponent;
}

// The softmax denominator of a row: each of its keys has the weight exp(score - origin) * 2^-m, and
// l is the sum of these weights. The origin is 0, or the sink if that is the largest score.
struct RowNormaliser {
  float m;
  float l;
  float origin = 0.0f;

  // Adds a sink to l. Returns the factor by which the sums over values must be multiplied.
  TILEWISE_DEVICE float add_sink(float sink) {
    const float exponent = ptx::fma(sink - origin, kLog2e, -m);
    if (m != kNoKey && !(exponent > 0.0f)) {
      l += ptx::ex2(exponent);
      return 1.0f;
    }
    if (sink == kMinusInfinity) return 1.0f;
    const float shrink = m == kNoKey ? 0.0f : ptx::ex2(-exponent);
    *this = {0.0f, l * shrink + 1.0f, sink};
    return shrink;
  }

  // The lse in fp32; for 16-bit elements with the approximate logarithm.
  template <class Element>
  TILEWISE_DEVICE float lse() const {
    if (l == 0.0f) return kMinusInfinity;
    if constexpr (Element::kBytes == 2) return origin + (m + ptx::lg2(l)) * kLn2High;
    return origin + (m * kLn2High + ptx::log_accurate(l));
  }

  // The exact log-sum-exp minus the `lse` above. Exponents were computed with unit * log2(e)
  // rounded to fp32; the effect of that rounding on m is included.
  template <class Element>
  TILEWISE_DEVICE float low(float lse, float unit) const {
    const float scale = unit * kLog2e;
    const float rounding = ptx::fma(unit, kLog2eLow, ptx::fma(unit, kLog2e, -scale));
    float x = m;  // in units of ln 2
    float x_low = m * (rounding * ptx::rcp_approximate(scale));
    float rest = 0.0f;
    if constexpr (Element::kBytes == 2) {
      const float log2_l = ptx::lg2(l);
      x = m + log2_l;
      x_low += log2_l - (x - m);  // exact where it matters, that is where m is the larger term
    } else {
      rest = ptx::log_accurate(l);
    }
    const float product = x * kLn2High;
    const float product_low =
        ptx::fma(x, kLn2Low, ptx::fma(x_low, kLn2High, ptx::fma(x, kLn2High, -product)));
    const float low = (((origin - lse) + product) + rest) + product_low;
    return low - low == 0.0f ? low : 0.0f;  // 0 for a row without keys, or with infinities
  }

 private:
  static constexpr float kLn2High = static_cast<float>(kLn2);
  static constexpr float kLn2Low = static_cast<float>(kLn2 - double{kLn2High});
  static constexpr float kLog2eLow = static_cast<float>(kLog2eExact - double{kLog2e});
};

// Whether row r must be computed again by write_exact_row: l has overflowed, or |m| is so large
// that the rounding of exponents to fp32 changes the weights. With a bias the sum of score and bias
// is itself rounded to fp32, so the error of the exponents only matters beyond 2^24. Without a
// bias, plain fp32 attention and the backward round the score (the product times the scale), but
// this forward rounds the exponent: from 2^12 on the results differ. kKeys: keys per tile.
// kClampExponents: exponents went through `clamp_exponent`; otherwise m may be kNoKey although the
// row sees a key.
template <int kKeys, bool kClampExponents>
TILEWISE_DEVICE bool needs_recompute(const Problem& p, const QueryTile& q_tile, int32_t r, float m,
                                     float l) {
  if (!(l <= kOverflow)) return true;
  if (kClampExponents && m == kNoKey) return false;
  if (!(__builtin_fabsf(m) > (p.bias != nullptr ? kMaxExponentWithBias : kMaxExponent)))
    return false;
  const int32_t row = q_tile.rows.row(r);
  const KeyTiles& tiles = q_tile.tiles;
  const int32_t first_key = max(max(0, tiles.lower + row), tiles.first * kKeys);
  const int32_t end = min(min(tiles.keys, tiles.upper + row), (tiles.last + 1) * kKeys);
  return first_key < end;  // otherwise the row sees no key
}

// Adds up l over the quad, adds the sink, and computes the results of the rows. `weight` multiplies
// the output (the scale of the weights that dropout keeps); unit() is the unit of the scores. With
// kLow the low parts of lse are computed if the caller wants them; otherwise they are 0.
template <class Element, bool kLow, int kRows, class Unit>
TILEWISE_DEVICE RowResults<kRows> finish_rows(const ForwardParams& p, const QueryTile& q_tile,
                                              const LanePosition& position,
                                              const float (&row_m)[kRows][2],
                                              float (&row_l)[kRows][2], float weight,
                                              const Unit& unit) {
  const bool sinks = p.problem.sinks != nullptr && q_tile.splits == 1;
  RowResults<kRows> result;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowNormaliser row{row_m[i][h], tile::quad_sum(row_l[i][h])};
      float factor = weight;
      if (sinks) [[unlikely]]
        factor *= row.add_sink(p.problem.sinks[q_tile.head(position.row(i, h))]);
      const float l = row.l;
      row_l[i][h] = l;
      const float inverse = Element::kBytes == 2 ? factor * ptx::rcp_approximate(l) : factor / l;
      result.factor[i][h] = l == 0.0f ? 0.0f : inverse;
      result.lse[i][h] = row.template lse<Element>();
      result.low[i][h] = 0.0f;
      if (kLow && q_tile.splits == 1 && p.problem.lse_low != nullptr)
        result.low[i][h] = row.template low<Element>(result.lse[i][h], unit());
    }
  }
  return result;
}

// Whether all sums of this lane's rows are finite. If not, they may be contaminated by NaN: 0 * NaN
// of keys that the row does not attend to.
template <int kRows, int kColumns>
TILEWISE_DEVICE bool outputs_are_finite(const QueryTile& q_tile, const LanePosition& position,
                                        const tile::Sums<kRows, kColumns>& o,
                                        const float (&row_l)[kRows][2]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float zero[2] = {row_l[i][h] * 0.0f, 0.0f};  // becomes NaN with any infinity or NaN
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) zero[e] = ptx::fma(o.x[i][n][2 * h + e], 0.0f, zero[e]);
      }
      finite &= position.row(i, h) >= q_tile.rows.count || zero[0] + zero[1] == 0.0f;
    }
  }
  return finite;
}

// Index of the partial result of row r: in partial_lse and, times head_dim_v, in partial_out.
TILEWISE_DEVICE int64_t partial_index(const ForwardParams& p, const QueryTile& q_tile, int32_t r) {
  if (p.chunks.any()) return chunk_result_index(p, q_tile) * p.packed_rows + r;
  const int64_t row = partial_row(p.problem, p.partial_stride, q_tile.sequence,
                                  q_tile.rows.first + q_tile.rows.row(r));
  return (q_tile.split * partial_rows(p.problem, p.partial_stride) + row) * p.problem.heads_q +
         q_tile.head(r);
}

// Stores row (i, h) of the lane in fp32. A lane holds pairs of columns; kEven: rows have an even
// number of columns, and a pair is stored by one instruction.
template <bool kEven, class Columns, int kRows, int kColumns>
TILEWISE_DEVICE void store_row_in_fp32(float* out, int columns, const LanePosition& position,
                                       const tile::Sums<kRows, kColumns>& o,
                                       const RowResults<kRows>& result, int i, int h) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = Columns::of_tile(n) + Columns::of_lane(position.column);
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

// Stores the partial results of one split.
template <bool kEven = false, class Columns = tile::TwoColumns, int kRows, int kColumns>
TILEWISE_DEVICE void store_partial(const ForwardParams& p, const QueryTile& q_tile,
                                   const LanePosition& position,
                                   const tile::Sums<kRows, kColumns>& o,
                                   const RowResults<kRows>& result) {
  const int columns = static_cast<int>(p.problem.head_dim_v);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = position.row(i, h);
      if (r >= q_tile.rows.count) continue;
      const int64_t index = partial_index(p, q_tile, r);
      if (position.column == 0) p.partial_lse[index] = result.lse[i][h];
      store_row_in_fp32<kEven, Columns>(p.partial_out + index * columns, columns, position, o,
                                        result, i, h);
    }
  }
}

// Stores rows of out where the caller wants them in fp32 (`widens_out`).
template <bool kEven = false, class Columns = tile::TwoColumns, int kRows, int kColumns>
TILEWISE_DEVICE void store_wide_outputs(const Problem& p, const QueryTile& q_tile,
                                        const LanePosition& position,
                                        const tile::Sums<kRows, kColumns>& o,
                                        const RowResults<kRows>& result) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = position.row(i, h);
      if (r >= q_tile.rows.count) continue;
      store_row_in_fp32<kEven, Columns>(static_cast<float*>(p.out.data) + q_tile.offset(p.out, r),
                                        static_cast<int>(p.head_dim_v), position, o, result, i, h);
    }
  }
}

// Index of packed row r in lse.
TILEWISE_DEVICE int64_t lse_index(const Problem& p, const QueryTile& q_tile, int32_t r) {
  const int64_t row =
      q_tile.sequence.lse_offset(p.lse_stride_batch, q_tile.rows.first + q_tile.rows.row(r));
  return row + q_tile.head(r) * p.lse_stride_head;
}

// Stores a row's lse at index `position`, if the caller wants it.
TILEWISE_DEVICE void store_log_sum(const Problem& p, int64_t position, const LogSum& sum) {
  if (p.lse == nullptr) return;
  p.lse[position] = sum.lse;
  if (p.lse_low != nullptr) p.lse_low[position] = sum.low;
}

template <int kRows>
TILEWISE_DEVICE void store_lse(const Problem& p, const QueryTile& q_tile,
                               const LanePosition& position, const RowResults<kRows>& result) {
  if (p.lse == nullptr || position.column != 0) return;
  if (!q_tile.rows.packed()) {
    const int32_t left = q_tile.rows.count - position.row0;
    const int64_t first =
        q_tile.rows.first_head * p.lse_stride_head +
        q_tile.sequence.lse_offset(p.lse_stride_batch, q_tile.rows.first + position.row0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (16 * i + 8 * h < left)
          store_log_sum(p, first + 16 * i + 8 * h, {result.lse[i][h], result.low[i][h]});
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = position.row(i, h);
      if (r < q_tile.rows.count)
        store_log_sum(p, lse_index(p, q_tile, r), {result.lse[i][h], result.low[i][h]});
    }
  }
}

}  // namespace tilewise::cuda
