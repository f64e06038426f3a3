// The online softmax of the forward (FlashAttention-2, arXiv 2307.08691, section 3.1), with a
// running maximum that is raised only when necessary.
#pragma once

#include <cfloat>

#include "attention/online_softmax.h"
#include "cuda/common/forward_results.h"
#include "cuda/mma_sync/forward_descales.h"
#include "cuda/mma_sync/forward_rows.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/quad.h"

namespace tilewise::cuda::mma_sync {

// The rows and columns of this thread. Computed where they are used, since they would otherwise
// occupy registers throughout the loop.
template <class C>
TILEWISE_DEVICE LanePosition lane_position() {
  return LanePosition::of(thread_of_rows<C>(opaque_thread<C>()), C::kForward.warp_rows);
}

template <class C>
using Scores = tile::Sums<C::kForward.warp_rows / 16, C::kForward.keys / 8>;
template <class C>
using Outputs = tile::Sums<C::kForward.warp_rows / 16, C::kWarpColumns / 8>;

// Scores outside of the band become -inf. The limits of a row are relative to the lane's first key.
template <class C>
TILEWISE_DEVICE void mask(Scores<C>& s, const QueryTile& q_tile, int32_t tile) {
  const LanePosition position = lane_position<C>();
  const int32_t key0 = tile * C::kForward.keys + position.column;
  // Most bands have no left limit, and those that have one cut few tiles.
  if (q_tile.tiles.lower + C::kForward.rows() > tile * C::kForward.keys) {
#pragma unroll
    for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t begin = q_tile.tiles.lower + q_tile.rows.row(position.row(m, h)) - key0;
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
      const int32_t row = q_tile.rows.row(position.row(m, h));
      const int32_t end = min(q_tile.tiles.keys, q_tile.tiles.upper + row) - key0;
#pragma unroll
      for (int n = 0; n < C::kForward.keys / 8; ++n) {
        if (8 * n >= end) s.x[m][n][2 * h] = kMinusInfinity;
        if (8 * n + 1 >= end) s.x[m][n][2 * h + 1] = kMinusInfinity;
      }
    }
  }
}

// The running maximum and sum of the rows of a lane. Weights are 2^(scale * s - m); `l` holds the
// sum of this lane's weights only. m starts at the lowest finite number, not at -inf, so that -inf
// is never subtracted from -inf.
template <class C>
struct RowSoftmax {
  static constexpr int kRows = C::kForward.warp_rows / 16;
  // How far, as a power of 2, weights may exceed 1 before the maximum is raised. Raising is then
  // rare; each time costs a pass over the output.
  static constexpr float kSlack = 8.0f;

  // When the maximum has been raised, the largest weight is 2^kTopExponent. F16 has no number below
  // 2^-24, so that among a million keys the small weights of BF16 queries would be lost; with a
  // float8 cache, weights therefore go up to 2^15.
  static constexpr float kTopExponent = C::kFloat8 ? 7.0f : 0.0f;
  using Scale = std::conditional_t<C::kFloat8 && !C::kGeneral, RowScales<kRows>, UniformScale>;

  float m[kRows][2];
  float l[kRows][2];
  Scale scale;  // positive

  template <class Descales>
  TILEWISE_DEVICE RowSoftmax(float log2_scale, const Descales& descales)
      : scale(log2_scale, descales) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      m[i][0] = m[i][1] = -FLT_MAX;
      l[i][0] = l[i][1] = 0.0f;
    }
  }

  // Raises m to the highest score where the scores require it: the weight of a single key is then a
  // power of two, which 16 bits hold exactly.
  TILEWISE_DEVICE void raise(const Scores<C>& s, Outputs<C>& o) {
    float highest[kRows][2];
    bool more = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = ptx::fmax(s.x[i][0][2 * h], s.x[i][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < C::kForward.keys / 8; ++n)
          x = ptx::fmax(x, ptx::fmax(s.x[i][n][2 * h], s.x[i][n][2 * h + 1]));
        highest[i][h] =
            kTopExponent == 0.0f ? x * scale.at(i, h) : ptx::fma(x, scale.at(i, h), -kTopExponent);
        if constexpr (C::kGeneral) highest[i][h] = clamp_exponent(x, highest[i][h]);
        more |= highest[i][h] > m[i][h] + kSlack;
      }
    }
    if (!ptx::any(more)) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float reach = tile::quad_max(highest[i][h]);
        if constexpr (!C::kWarpPipeline) reach = round_exponent_up(reach);
        const float raised = ptx::fmax(m[i][h], reach);
        const float factor = ptx::ex2(m[i][h] - raised);
        m[i][h] = raised;
        l[i][h] *= factor;
#pragma unroll
        for (int n = 0; n < C::kWarpColumns / 8; ++n) {
          o.x[i][n][2 * h] *= factor;
          o.x[i][n][2 * h + 1] *= factor;
        }
      }
    }
  }

  // Turns scores into weights.
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
};

}  // namespace tilewise::cuda::mma_sync
