// How the lse of the forward turns scores into weights, in the passes that read it.
#pragma once

#include "cpu/generic/score_tile.h"
#include "cpu/generic/softmax.h"

namespace tilewise::cpu {
namespace {

// P = 2^((S - base) c - rest), per lane. `base` is lse in the units of S, rounded to fp32, so that
// S - base is exact where it matters; `rest` makes up for the rounding. The forward computed rows
// with huge scores in natural units, so they use these here as well.
struct RowWeights : WeightScratch {
  const Problem* problem;
  Score score;
  bool general;
  bool all_plain = true;  // all rows that were loaded since lane 0 use the plain form

  // The constants of W lanes.
  struct OfLanes {
    F base;
    F rest;
    F c;
    I huge;
    I single_key;
  };

  TILEWISE_FN RowWeights(const WeightScratch& scratch, const Problem& p, const Score& a_score)
      : WeightScratch(scratch), problem(&p), score(a_score), general(is_general(p, a_score)) {}

  // Prepares the constants of one row.
  TILEWISE_FN void load_row(const Sequence& s, int64_t lane, int64_t row, int64_t head) {
    const LogSum sum = log_sum_of(*problem, s, row, head);
    const bool is_huge = __builtin_fabsf(sum.lse) > kHugeScore && sum.lse != kMinusInfinity;
    const double scale = static_cast<double>(score.scale);
    const double unit = general || is_huge ? 1.0 : scale;
    const double units = general || is_huge ? 1.0 : 1.0 / scale;
    const float nearest = static_cast<float>(static_cast<double>(sum.lse) * units);
    const double left =
        static_cast<double>(sum.lse) - static_cast<double>(nearest) * unit + sum.low;
    base[lane] = sum.lse == kMinusInfinity ? 0.0f : nearest;
    rest[lane] = left - left == 0.0 ? static_cast<float>(left * kLog2eExact) : 0.0f;
    c[lane] = static_cast<float>(unit * kLog2eExact);
    huge[lane] = is_huge && !general ? -1 : 0;
    all_plain = (lane == 0 || all_plain) && !is_huge;
    single_key[lane] = 0;  // the backward sets it
  }

  template <bool kPlain>
  TILEWISE_FN OfLanes of_lanes(int64_t first) const {
    return {.base = load(base + first),
            .rest = load(rest + first),
            .c = kPlain ? splat(c[first]) : load(c + first),
            .huge = kPlain ? I{} : load_as<I>(huge + first),
            .single_key = kPlain ? I{} : load_as<I>(single_key + first)};
  }

  template <class T, bool kPlain>
  TILEWISE_FN F weight(const OfLanes& of, F value) const {
    if (!kPlain) value = of.huge ? value * score.scale : value;
    const F exponent = (value - of.base) * of.c - of.rest;
    // lse is rounded, so a weight could exceed 1 by that rounding: clamp it.
    return exp2<kExpDegree<T>>(exponent > 0.0f ? F{} : exponent);
  }
};

}  // namespace
}  // namespace tilewise::cpu
