// The online softmax of the forward (FlashAttention-2, arXiv 2307.08691, section 3.1), with a
// maximum that moves only when it must.
#pragma once

#include <cfloat>

#include "attention/online_softmax.h"
#include "cuda/common/forward_results.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/mma_sync/forward_units.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda::mma_sync {

// Computed where it is asked for: it would otherwise wait in registers through the loop.
template <class C>
TILEWISE_DEVICE LanePlace lane_place() {
  return LanePlace::of(recent_thread<C>(), C::kForward.warp_rows);
}

template <class C>
using Scores = tile::Sums<C::kForward.warp_rows / 16, C::kForward.keys / 8>;
template <class C>
using Outputs = tile::Sums<C::kForward.warp_rows / 16, C::kHeadDim / 8>;

// Scores that the band hides become -inf. The limits of a row are relative to the first key of the
// lane.
template <class C>
TILEWISE_DEVICE void mask(Scores<C>& s, const BlockWork& work, int32_t tile) {
  const LanePlace place = lane_place<C>();
  const int32_t key0 = tile * C::kForward.keys + place.column;
  // Most bands have no left limit, and few of the tiles of those that have one meet it.
  if (work.tiles.lower + C::kForward.rows() > tile * C::kForward.keys) {
#pragma unroll
    for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t begin = work.tiles.lower + work.rows.row(place.row(m, h)) - key0;
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
          if (8 * n < begin) s.x[m][n][2 * h] = kMinusInfinity;
          if (8 * n + 1 < begin) s.x[m][n][2 * h + 1] = kMinusInfinity;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = work.rows.row(place.row(m, h));
      const int32_t end = min(work.tiles.keys, work.tiles.upper + row) - key0;
#pragma unroll
      for (int n = 0; n < C::kForward.keys / 8; ++n) {
        if (8 * n >= end) s.x[m][n][2 * h] = kMinusInfinity;
        if (8 * n + 1 >= end) s.x[m][n][2 * h + 1] = kMinusInfinity;
      }
    }
  }
}

// Running maximum and sum of the rows of a lane. Weights are 2^(scale * s - m); `l` holds only what
// this lane has summed. m starts at the lowest number and not at -inf: no -inf meets another.
//
// Where m would be beyond kFar, its rounding would be felt: of scores of 1e10 by 2^1000. Such a row
// gets an origin, the largest score that it has seen, in natural units: weights are
// exp(score - origin) * 2^-m with a small m. The scores are rounded and made relative to it in a
// branch of their own, so that all other rows pay nothing; the same branch looks at rows that have
// seen no key, whose first scores may be so low that scale * s overflows.
template <class C>
struct RowSoftmax {
  static constexpr int kRows = C::kForward.warp_rows / 16;
  // How far, as a power of 2, weights may exceed 1 before the maximum moves. Moves are then rare,
  // and every one of them costs a pass over the output.
  static constexpr float kSlack = 8.0f;
  static constexpr float kNoKey = RowNormaliser::kNoKey;
  // Products times a scale are rounded in fp32 and in the backward, but not in an exponent: this
  // far it makes no difference.
  static constexpr float kFar = C::Element::kBytes == 2 ? 0x1p12f : 0x1p7f;

  // Weights start at 2^kFirst. F16 has none below 2^-24, which queries of BF16 would miss among a
  // million keys; the highest of float8 are thus 2^15.
  static constexpr float kFirst = C::kFloat8 ? 7.0f : 0.0f;
  using Scale = std::conditional_t<C::kFloat8 && !C::kGeneral, RowScales<kRows>, OneScale>;

  float m[kRows][2];
  float l[kRows][2];
  Scale scale;  // positive
  // Of the warp: some row has seen no key, or has an origin.
  bool has_unseen = true;
  bool has_origins = false;

  template <class Units>
  TILEWISE_DEVICE RowSoftmax(float log2_scale, const Units& units) : scale(log2_scale, units) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      m[i][0] = m[i][1] = kNoKey;
      l[i][0] = l[i][1] = 0.0f;
    }
  }

  // Raises m where the scores ask for it, to the highest of them: the weight of a key that is alone
  // is then a power of two, which 16 bits hold exactly. Makes scores of rows with an origin
  // relative to it. `unit()` is what scores are in, in natural units.
  template <class Unit>
  TILEWISE_DEVICE void raise(Scores<C>& s, Outputs<C>& o, uint32_t first_byte, const Unit& unit) {
    float highest[kRows][2];
    bool more = has_unseen || has_origins;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = ptx::fmax(s.x[i][0][2 * h], s.x[i][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < C::kForward.keys / 8; ++n)
          x = ptx::fmax(x, ptx::fmax(s.x[i][n][2 * h], s.x[i][n][2 * h + 1]));
        highest[i][h] = x;
        more |= exponent(x, i, h) > m[i][h] + kSlack;
      }
    }
    if (!ptx::any(more)) return;
    bool unseen = false;
    uint32_t far = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = tile::quad_max(highest[i][h]);
        const float before = m[i][h];
        const float from = origin(i, h, first_byte);
        float reach = exponent(top, i, h);
        if (has_origins) [[unlikely]]
          reach = (natural(top, i, h, unit) - from) * kLog2e - kFirst;
        m[i][h] = ptx::fmax(before, reach);
        float factor = ptx::ex2(before - m[i][h]);
        if (top != kMinusInfinity && __builtin_fabsf(m[i][h]) > kFar) [[unlikely]] {
          far |= 1u << (2 * i + h);
          m[i][h] = -kFirst;
          const float change = ptx::fma(from - natural(top, i, h, unit), kLog2e, before + kFirst);
          factor = before == kNoKey ? 0.0f : ptx::ex2(change);
        }
        unseen |= m[i][h] == kNoKey;
        l[i][h] *= factor;
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; ++n) {
          o.x[i][n][2 * h] *= factor;
          o.x[i][n][2 * h + 1] *= factor;
        }
      }
    }
    has_unseen = ptx::any(unseen);
    if (has_origins || ptx::any(far != 0)) [[unlikely]]
      make_relative(s, highest, far, RowOrigins::of<C>(first_byte), unit);
  }

  // Scores become weights.
  TILEWISE_DEVICE void exponentiate(Scores<C>& s) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
          float* x = &s.x[i][n][2 * h];
          x[0] = ptx::ex2(ptx::fma(x[0], scale.at(i, h), -m[i][h]));
          x[1] = ptx::ex2(ptx::fma(x[1], scale.at(i, h), -m[i][h]));
          sum += x[0] + x[1];
        }
        l[i][h] += sum;
      }
    }
  }

  // Those of rows (0, h), where a row has one.
  TILEWISE_DEVICE void keep_origins(const float (&x)[2], uint32_t first_byte) {
    if (!has_origins && !ptx::any(x[0] != 0.0f || x[1] != 0.0f)) return;
    const LanePlace place = lane_place<C>();
    const RowOrigins origins = RowOrigins::of<C>(first_byte);
    ptx::sync_warp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (place.column == 0) origins.set(place.row(0, h), x[h]);
    }
    ptx::sync_warp();
    has_origins = true;
  }

  // The origin of row (i, h); 0: none.
  TILEWISE_DEVICE float origin(int i, int h, uint32_t first_byte) const {
    return has_origins ? RowOrigins::of<C>(first_byte).get(lane_place<C>().row(i, h)) : 0.0f;
  }

 private:
  template <class Unit>
  TILEWISE_DEVICE float natural(float x, int i, int h, const Unit& unit) const {
    return ptx::mul(x, scale.unit(i, h, unit()));
  }
  // Relative to kFirst.
  TILEWISE_DEVICE float exponent(float x, int i, int h) const {
    return kFirst == 0.0f ? x * scale.at(i, h) : ptx::fma(x, scale.at(i, h), -kFirst);
  }

  // Keeps the origins of the rows that are `far` (a bit each), and makes all scores relative to
  // those of their rows.
  template <class Unit>
  TILEWISE_DEVICE void make_relative(Scores<C>& s, const float (&highest)[kRows][2], uint32_t far,
                                     const RowOrigins& origins, const Unit& unit) {
    const LanePlace place = lane_place<C>();
    ptx::sync_warp();  // the origins before have been read
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = tile::quad_max(highest[i][h]);
        const bool is_far = (far >> (2 * i + h) & 1u) != 0;
        if (place.column == 0 && (is_far || !has_origins))
          origins.set(place.row(i, h), is_far ? natural(top, i, h, unit) : 0.0f);
      }
    }
    ptx::sync_warp();
    has_origins = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float origin = origins.get(place.row(i, h));
        const float of_row = scale.unit(i, h, unit());
        const float inverse = 1.0f / of_row;
#pragma unroll
        for (int n = 0; n < C::kForward.keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s.x[i][n][2 * h + e];
            x = (ptx::mul(x, of_row) - origin) * inverse;
          }
        }
      }
    }
  }
};

}  // namespace tilewise::cuda::mma_sync
