// What the general form does with scores: the terms of slopes and bias, and the dropout decisions,
// in vectors along rows (a panel of a key tile, S^T[key][lane]) or along keys (decoding).
#pragma once

#include "attention/online_softmax.h"
#include "cpu/generic/lanes.h"

namespace tilewise::cpu {
namespace {

TILEWISE_FN float slope_of(const Problem& p, int64_t batch, int64_t head) {
  return p.alibi_slopes != nullptr ? p.alibi_slopes[batch * p.alibi_stride_batch + head] : 0.0f;
}

TILEWISE_FN int64_t bias_offset(const Problem& p, int64_t batch, int64_t head, int64_t row) {
  return batch * p.bias_stride_batch + head * p.bias_stride_head + row * p.bias_stride_row;
}
TILEWISE_FN float bias_at(const void* bias, int32_t dtype, int64_t offset) {
  if (dtype == TILEWISE_FLOAT32) return static_cast<const float*>(bias)[offset];
  if (dtype == TILEWISE_FLOAT16) return to_float(static_cast<const Half*>(bias)[offset]);
  return to_float(static_cast<const BFloat16*>(bias)[offset]);
}
TILEWISE_FN float bias_at(const Problem& p, int64_t offset) {
  return bias_at(p.bias, p.bias_dtype, offset);
}

// The bias of W keys, of which `count` exist: 0 or fewer beyond the end of a padded step.
TILEWISE_FN F bias_of_keys(const Problem& p, int64_t offset, int64_t count) {
  if (count <= 0) return F{};
  const auto from = [&](const auto* bias) {
    return count >= W ? to_fp32(bias + offset) : to_fp32_tail(bias + offset, count);
  };
  if (p.bias_dtype == TILEWISE_FLOAT32) return from(static_cast<const float*>(p.bias));
  if (p.bias_dtype == TILEWISE_FLOAT16) return from(static_cast<const Half*>(p.bias));
  return from(static_cast<const BFloat16*>(p.bias));
}

// The factor of an ALiBi slope: the distance of a key from the one that the row is aligned with.
TILEWISE_FN F magnitude(I diagonal) {
  return __builtin_convertvector(diagonal < 0 ? -diagonal : diagonal, F);
}

// The score terms of the general form, per lane of a panel.
struct ScoreTile : ScoreScratch {
  const Problem* problem;
  Score score;

  // Reads the slopes and the bias of the panel that starts at lane `first` of `lanes`, into the
  // lanes of this tile from `at` on.
  TILEWISE_FN void load_panel(const Sequence& s, const Lanes& lanes, int64_t first, int64_t panel,
                              Range keys, int64_t at) {
    const Problem& p = *problem;
    for (int64_t i = 0; i < panel; ++i) {
      const int64_t lane = min(first + i, lanes.count - 1);
      slope[at + i] = slope_of(p, s.batch, lanes.head[lane]);
      if (bias == nullptr) continue;
      const int64_t offset = bias_offset(p, s.batch, lanes.head[lane], lanes.row[lane]);
      for (int64_t key = keys.begin; key < keys.end; ++key)
        bias[(key - keys.begin) * ld + at + i] = bias_at(p, offset + key);
    }
  }

  TILEWISE_FN static I diagonal(const Sequence& s, const Lanes& lanes, int64_t lane, Range keys) {
    I d;
    for (int i = 0; i < W; ++i)
      d[i] = static_cast<int32_t>(lanes.row[lane + i] + s.band.shift() - keys.begin);
    return d;
  }

  // W scores from `lane` of this tile on.
  TILEWISE_FN Score::Capped<F> at(F raw, I diagonal, int32_t key, int64_t lane) const {
    const F b = bias != nullptr ? load(bias + key * ld + lane) : F{};
    return score.apply<VectorMath>(raw, load(slope + lane), magnitude(diagonal - key), b);
  }
};

// The dropout decisions of a block of keys for W lanes: Dropout::kept in vectors.
struct KeepMask {
  U kept;

  // `key` is any key of the block.
  TILEWISE_FN static KeepMask of(const Dropout& dropout, const Problem& p, const Sequence& s,
                                 const Lanes& lanes, int64_t lane, int64_t key) {
    U row, batch_head;
    for (int i = 0; i < W; ++i) {
      row[i] = static_cast<uint32_t>(lanes.row[lane + i]);
      batch_head[i] = dropout_head(p, s.batch, lanes.head[lane + i]);
    }
    const U block = U{} + static_cast<uint32_t>(key / Dropout::kKeysPerBlock);
    return {dropout.kept_keys<VectorMath>(dropout.counter(block, row, batch_head))};
  }

  // 1 / (1 - p) where `key` of the block is kept, 0 where it is dropped.
  TILEWISE_FN F scale(const Dropout& dropout, int64_t key) const {
    const uint32_t bit = 1u << (key % Dropout::kKeysPerBlock);
    return (kept & bit) != 0u ? splat(dropout.keep_scale) : F{};
  }
};

// The same factors as KeepMask::scale, of one row for W keys from `key` on.
TILEWISE_FN F keep_scale_of_keys(const Dropout& dropout, int64_t batch_head, int64_t row,
                                 int64_t key) {
  constexpr uint32_t kBlock = Dropout::kKeysPerBlock;
  const U keys = static_cast<uint32_t>(key) + __builtin_convertvector(lane_numbers(), U);
  const U kept = dropout.kept_keys<VectorMath>(dropout.counter(
      keys / kBlock, U{} + static_cast<uint32_t>(row), U{} + static_cast<uint32_t>(batch_head)));
  return (kept >> keys % kBlock & 1u) != 0u ? splat(dropout.keep_scale) : F{};
}

}  // namespace
}  // namespace tilewise::cpu
