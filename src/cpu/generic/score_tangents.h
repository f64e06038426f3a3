// The tangents of the scores, in vectors of rows, as the passes jvp and second share them.
#pragma once

#include "cpu/generic/row_weights.h"

namespace tilewise::cpu {
namespace {

// With x = q.k, x' = q'.k + q.k' and the first two derivatives of the softcap f:
//   z' = scale x' + scale' x        s' = f'(scale x) z' + bias'
struct ScoreTangents : BiasTangentScratch {
  const Problem* problem;
  const Tangents* tangents;
  float scale;
  float scale_tangent;

  // One weight and what belongs to it.
  struct Element {
    F weight;
    F tangent;  // s'
    F scaled;   // z'
    F derivative;
    F second;
  };

  TILEWISE_FN ScoreTangents(const BiasTangentScratch& scratch, const Problem& p, const Tangents& t,
                            const Score& score)
      : BiasTangentScratch(scratch),
        problem(&p),
        tangents(&t),
        scale(score.scale),
        scale_tangent(t.scale != nullptr ? *t.scale : 0.0f) {}

  // Whether q.k has a tangent, and whether any score has.
  TILEWISE_FN bool of_products() const {
    return tangents->q.data != nullptr || tangents->k.data != nullptr;
  }
  TILEWISE_FN bool any() const {
    return of_products() || tangents->scale != nullptr || tangents->bias != nullptr;
  }

  // Reads the tangent of the bias for the panel that starts at lane `first` of `lanes`, into the
  // lanes of this tile from `at` on.
  TILEWISE_FN void load_panel(const Sequence& s, const Lanes& lanes, int64_t first, int64_t panel,
                              Range keys, int64_t at) {
    if (bias == nullptr) return;
    const Tangents& t = *tangents;
    for (int64_t i = 0; i < panel; ++i) {
      const int64_t lane = min(first + i, lanes.count - 1);
      const int64_t offset = s.batch * t.bias_stride_batch + lanes.head[lane] * t.bias_stride_head +
                             lanes.row[lane] * t.bias_stride_row;
      for (int64_t key = keys.begin; key < keys.end; ++key)
        bias[(key - keys.begin) * ld + at + i] = bias_at(t.bias, problem->bias_dtype, offset + key);
    }
  }

  // W scores from `lane` of this tile on. kPlain: no option changes the scores.
  template <class T, bool kPlain>
  TILEWISE_FN Element at(const ScoreTile& scores, const RowWeights& weights,
                         const RowWeights::OfLanes& row, F raw, F raw_tangent, I diagonal,
                         int32_t key, int64_t lane) const {
    Score::Capped<F> score{raw, splat(1.0f)};
    const bool changed = !kPlain && weights.general;
    if (changed) score = scores.at(raw, diagonal, key, lane);
    Element e;
    e.weight = weights.template weight<T, kPlain>(row, score.value);
    e.scaled = raw_tangent * scale + raw * scale_tangent;
    e.derivative = score.derivative;
    e.second = score.second;
    e.tangent = changed ? score.derivative * e.scaled : e.scaled;
    if (changed && bias != nullptr) e.tangent = e.tangent + load(bias + key * ld + lane);
    return e;
  }
};

}  // namespace
}  // namespace tilewise::cpu
