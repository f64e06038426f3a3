// The general form of a score in device code, one element at a time: what `Score` and `Dropout`
// take from the problem for a row and a key.
#pragma once

#include "attention/problem.h"
#include "base/half.h"
#include "cuda/common/device_math.h"

namespace tilewise::cuda {

// What the terms of one row of one query head share.
struct RowTerms {
  float slope;          // 0: no ALiBi
  int32_t diagonal;     // i + Sk - Sq: the key at distance 0
  uint32_t row;         // counter words of dropout
  uint32_t batch_head;  //
  int64_t bias;         // offset in elements of the bias of key 0
};

// Dropout factors of the keys [8 b, 8 b + 8) of one row: 1 / (1 - p) where kept, else 0.
struct KeepFactors {
  PhiloxState<uint32_t> bits;
  uint32_t threshold;
  float scale;

  TILEWISE_DEVICE float low_high(uint32_t word, int high) const {
    return (high != 0 ? word >> 16 : word & 0xffffu) >= threshold ? scale : 0.0f;
  }
  // Key `i` of the eight.
  TILEWISE_DEVICE float at(int i) const {
    const uint32_t word = i < 4 ? (i < 2 ? bits.c0 : bits.c1) : (i < 6 ? bits.c2 : bits.c3);
    return low_high(word, i % 2);
  }
};

struct ScoreTerms {
  Score score;
  Dropout dropout;
  const void* bias;  // null: none
  int32_t bias_dtype;

  TILEWISE_DEVICE static ScoreTerms of(const Problem& p) {
    return {score_of(p), dropout_of(p), p.bias, p.bias_dtype};
  }

  // Row i of the sequence, query head `head`.
  TILEWISE_DEVICE static RowTerms row(const Problem& p, const Sequence& s, int64_t i,
                                      int64_t head) {
    RowTerms r;
    r.slope =
        p.alibi_slopes != nullptr ? p.alibi_slopes[s.batch * p.alibi_stride_batch + head] : 0.0f;
    r.diagonal = static_cast<int32_t>(i + s.band.shift());
    r.row = static_cast<uint32_t>(i);
    r.batch_head = static_cast<uint32_t>(s.batch * p.heads_q + head);
    r.bias = s.batch * p.bias_stride_batch + head * p.bias_stride_head + i * p.bias_stride_row;
    return r;
  }

  TILEWISE_DEVICE float bias_at(int64_t offset) const {
    if (bias_dtype == TILEWISE_FLOAT32) return static_cast<const float*>(bias)[offset];
    const uint16_t bits = static_cast<const uint16_t*>(bias)[offset];
    return bias_dtype == TILEWISE_FLOAT16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
  }

  // Value and derivative of the score of `raw` = q.k in natural units. Row and key must be visible
  // to each other: outside the band bias has no element.
  TILEWISE_DEVICE Score::Capped<float> at(float raw, const RowTerms& row, int64_t key) const {
    const int32_t d = row.diagonal - static_cast<int32_t>(key);
    const float distance = static_cast<float>(d < 0 ? -d : d);
    const float b = bias != nullptr ? bias_at(row.bias + key) : 0.0f;
    return score.apply<DeviceMath>(raw, row.slope, distance, b);
  }

  // `key` is any of the eight keys of its block.
  TILEWISE_DEVICE KeepFactors keep(const RowTerms& row, int64_t key) const {
    const auto block = static_cast<uint32_t>(key / Dropout::kKeysPerBlock);
    return {dropout.block<DeviceMath>(block, row.row, row.batch_head), dropout.threshold,
            dropout.keep_scale};
  }
};

}  // namespace tilewise::cuda
