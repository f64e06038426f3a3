// The online softmax of a warpgroup's rows (FlashAttention-2, arXiv 2307.08691, section 3.1).
#pragma once

#include <cfloat>

#include "attention/online_softmax.h"
#include "cuda/common/forward_results.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

// Running maximum m and sum l of the two rows of a lane. Weights are 2^(scale * s - m); `l` holds
// only the sum over this lane's columns. m starts at the lowest finite number and not at -inf, so
// that -inf is never subtracted from -inf.
//
// Softmax gives the same row for any m; the maximum only prevents overflow. So m is the maximum
// of the first tiles and stays (`weigh`): without maxima, and without rescaling of sums, a step has
// a third fewer instructions (D128 is 8 to 12 % faster, D64 9 to 16 %). Sums that have grown large
// move m (`raise`), and a row that overflows fp32 in between is recomputed (nan_recompute.h).
struct RowSums {
  float m[1][2];
  float l[1][2];

  TILEWISE_DEVICE void clear() {
    m[0][0] = m[0][1] = -FLT_MAX;
    l[0][0] = l[0][1] = 0.0f;
  }
};

// The exponent of a weight before m is subtracted: a multiple of the score.
struct LinearExponent {
  float scale;  // positive

  TILEWISE_DEVICE float operator()(float x) const { return x * scale; }
  TILEWISE_DEVICE float operator()(float x, float term) const { return ptx::fma(x, scale, term); }
};

// kBounded: scores are not large, as with softcap. kClampExponents: scores may be so low, as with a
// bias, that their product with the scale overflows to -inf; see clamp_exponent. The largest weight
// of `update` is 2^kTopExponent: l has the same factor, so it cancels in out and in lse.
template <int kColumns, bool kBounded, bool kClampExponents, int kTopExponent = 0>
struct RowSoftmax : RowSums {
  using Scores = tile::Sums<1, kColumns>;
  static constexpr bool kIsBounded = kBounded;
  static constexpr bool kClampsExponents = kClampExponents;

  float shrink[2];  // factor for the sums of earlier steps
  float scale;      // positive

  // From this l on, m moves and o is rescaled: after the step if weights have the range of fp32
  // (bf16), within the step if they end at 2^16 (fp16). A row whose final l exceeds
  // kRescaleThreshold may have overflowed in between, so its outputs are checked.
  static constexpr float kRescaleThreshold = 0x1p24f;
  static constexpr float kRescaleThresholdFp16 = 0x1p14f;
  // A lower m comes from keys that a bias hides, with -1e4 for instance, and says nothing about
  // later scores.
  static constexpr float kHidden = -0x1p10f;

  TILEWISE_DEVICE bool is_hidden() const { return m[0][0] < kHidden || m[0][1] < kHidden; }

  // Turns scores into weights with m as it is. Returns whether m has to move: with kWide by the
  // sums before this step, so that nothing waits for the new ones.
  template <bool kWide, class Exponent>
  TILEWISE_DEVICE bool weigh(Scores& s, const Exponent& exponent) {
    const bool high = l[0][0] > kRescaleThreshold || l[0][1] > kRescaleThreshold;
    exponentiate(s, exponent);
    return kWide ? high : l[0][0] > kRescaleThresholdFp16 || l[0][1] > kRescaleThresholdFp16;
  }

  // Moves m so that l is near 1. `factor`: powers of 2 by which the caller multiplies the sums and
  // weights of the two rows.
  TILEWISE_DEVICE void raise(float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = tile::quad_max(l[0][h]);
      const bool grown = sum >= 1.0f && sum <= FLT_MAX;
      const int32_t bits = static_cast<int32_t>(ptx::bits_of(sum) >> 23) - 127;
      const int32_t exponent = grown ? min(bits, 126) : 0;
      factor[h] = ptx::float_of(static_cast<uint32_t>(127 - exponent) << 23);
      m[0][h] += static_cast<float>(exponent);
      l[0][h] *= factor[h];
    }
  }

  // Raises m to the maximum of the tile and turns scores into weights. kFirst: there are no earlier
  // steps. `exponent` must increase with the score.
  template <bool kFirst, class Exponent>
  TILEWISE_DEVICE void update(Scores& s, const Exponent& exponent) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2] = {s.x[0][0][2 * h], s.x[0][0][2 * h + 1]};
#pragma unroll
      for (int n = 1; n < kColumns; ++n) {
        x[0] = ptx::fmax(x[0], s.x[0][n][2 * h]);
        x[1] = ptx::fmax(x[1], s.x[0][n][2 * h + 1]);
      }
      const float before = kFirst ? -FLT_MAX : m[0][h];
      // The previous maximum joins after the lanes have exchanged theirs. If it joined before, the
      // schedule that ptxas finds would be 1 to 2 % slower (D64, D128).
      const float top = tile::quad_max(ptx::fmax(x[0], x[1]));
      float highest = exponent(top);
      if constexpr (!kBounded) highest = round_exponent_up(highest);
      if constexpr (kClampExponents) highest = clamp_exponent(top, highest);
      if constexpr (kTopExponent != 0) highest -= static_cast<float>(kTopExponent);
      m[0][h] = ptx::fmax(before, highest);
      shrink[h] = kFirst ? 1.0f : ptx::ex2(before - m[0][h]);
      l[0][h] = kFirst ? 0.0f : l[0][h] * shrink[h];
    }
    exponentiate(s, exponent);
  }

 protected:
  template <class Exponent>
  TILEWISE_DEVICE void exponentiate(Scores& s, const Exponent& exponent) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[0][n][e] = ptx::ex2(exponent(s.x[0][n][e], -m[0][e / 2]));
    }
    // The sums follow all exponentials and are added in two chains. Interleaved with the
    // exponentials they cost 10 to 17 % more, in four chains 2 % more.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        x[0] += s.x[0][n][2 * h];
        x[1] += s.x[0][n][2 * h + 1];
      }
      l[0][h] += x[0] + x[1];
    }
  }
};

// Replaces scores outside of the band by -inf.
template <int kColumns>
TILEWISE_DEVICE void mask(tile::Sums<1, kColumns>& s, const QueryTile& work_tile,
                          const LanePosition& position, int32_t tile) {
  const int32_t key0 = tile * (8 * kColumns) + position.column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = work_tile.rows.row(position.row(0, h));
    const int32_t end = min(work_tile.tiles.keys, work_tile.tiles.upper + row) - key0;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (8 * n >= end) s.x[0][n][2 * h] = kMinusInfinity;
      if (8 * n + 1 >= end) s.x[0][n][2 * h + 1] = kMinusInfinity;
    }
  }
  // Most bands have no left limit, and few tiles are cut by one.
  if (work_tile.tiles.lower + work_tile.rows.last_row() <= tile * (8 * kColumns)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t begin = work_tile.tiles.lower + work_tile.rows.row(position.row(0, h)) - key0;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (8 * n < begin) s.x[0][n][2 * h] = kMinusInfinity;
      if (8 * n + 1 < begin) s.x[0][n][2 * h + 1] = kMinusInfinity;
    }
  }
}

}  // namespace tilewise::cuda::wgmma
