// The score modifications of the general form in device code, one element at a time: softcap, ALiBi
// and bias (`Score`) and dropout (`Dropout`) for a row and a key.
#pragma once

#include "attention/problem.h"
#include "base/half.h"
#include "cuda/common/device_math.h"

namespace tilewise::cuda {

// The options that an instance of a loop supports: none, exactly one, or any combination. A loop
// for exactly one spends no registers on the others (docs/lab/hopper-kernels.md).
enum class Option { none, softcap, alibi, bias, dropout, any };

template <Option kOption>
inline constexpr bool kOneOption = kOption != Option::none && kOption != Option::any;

// The instance for the options of a problem. Option::bias stands for a bias in the 16-bit type of
// q, k and v, which is prefetched; fp32 bias takes Option::any. So does dropout in a shard whose
// blocks of keys are parts of two blocks of the whole problem (Dropout::key_shift).
TILEWISE_DEVICE Option option_of(const Problem& p) {
  constexpr float kMinP = 0x1p-17f;  // smaller probabilities round to 0 in dropout's 16 bits
  const bool on[] = {p.softcap != 0.0f, p.alibi_slopes != nullptr, p.bias != nullptr,
                     p.dropout_p >= kMinP};
  const int count = on[0] + on[1] + on[2] + on[3];
  if (count == 0) return Option::none;
  if (count != 1 || (on[2] && p.bias_dtype == TILEWISE_FLOAT32)) return Option::any;
  if (on[3] && p.key_offset % Dropout::kKeysPerBlock != 0) return Option::any;
  return on[0] ? Option::softcap : on[1] ? Option::alibi : on[2] ? Option::bias : Option::dropout;
}

// Whether each row of a 16-bit bias starts at a multiple of `bytes`, a power of 2.
TILEWISE_DEVICE bool bias_rows_are_aligned(const Problem& p, int64_t bytes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.bias));
  const int64_t strides = p.bias_stride_batch | p.bias_stride_head | p.bias_stride_row;
  return ((address | strides * 2) & (bytes - 1)) == 0;
}

// Runs the instance of a role for an option. kLoops: whether the role has an instance for each
// single option; otherwise the instance for any options runs.
template <bool kLoops, class Role>
TILEWISE_DEVICE void run_with_option(Option option, const Role& role) {
  if constexpr (kLoops) {
    switch (option) {
      case Option::softcap:
        return role.template run<Option::softcap>();
      case Option::alibi:
        return role.template run<Option::alibi>();
      case Option::bias:
        return role.template run<Option::bias>();
      case Option::dropout:
        return role.template run<Option::dropout>();
      default:
        break;
    }
  }
  role.template run<Option::any>();
}

// Whether option kAsked is on: a constant in a loop for exactly one option.
template <Option kOption, Option kAsked>
TILEWISE_DEVICE bool is_on(bool in_problem) {
  return kOption == kAsked || (kOption == Option::any && in_problem);
}

// The values that all keys of one row of one query head share.
struct RowScoreMod {
  float slope;          // 0: no ALiBi
  int32_t diagonal;     // i + Band::shift(): the key at distance 0
  uint32_t row;         // for Dropout::counter
  uint32_t batch_head;  // for Dropout::counter
  int64_t bias;         // index of the bias of key 0
};

// Dropout factors of one row and a block of Dropout::kKeysPerBlock keys: 1 / (1 - p) for a kept
// weight, 0 otherwise.
struct KeepFactors {
  uint32_t kept;
  float scale;

  // `key` is any key of the block.
  TILEWISE_DEVICE float at(int64_t key) const {
    return (kept >> (key % Dropout::kKeysPerBlock) & 1u) != 0 ? scale : 0.0f;
  }
};

// An element of the bias or of its tangent.
TILEWISE_DEVICE float bias_value(const void* bias, int32_t dtype, int64_t offset) {
  if (dtype == TILEWISE_FLOAT32) return static_cast<const float*>(bias)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(bias)[offset];
  return dtype == TILEWISE_FLOAT16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
}

struct ScoreMod {
  Score score;
  Dropout dropout;
  const void* bias;  // null: none
  int32_t bias_dtype;

  TILEWISE_DEVICE static ScoreMod of(const Problem& p) {
    return {score_of(p), dropout_of(p), p.bias, p.bias_dtype};
  }

  // Row i of a sequence, query head `head`.
  TILEWISE_DEVICE static RowScoreMod row(const Problem& p, const Sequence& s, int64_t i,
                                         int64_t head) {
    RowScoreMod r;
    r.slope =
        p.alibi_slopes != nullptr ? p.alibi_slopes[s.batch * p.alibi_stride_batch + head] : 0.0f;
    r.diagonal = static_cast<int32_t>(i + s.band.shift());
    r.row = static_cast<uint32_t>(i);
    r.batch_head = dropout_head(p, s.batch, head);
    r.bias = s.batch * p.bias_stride_batch + head * p.bias_stride_head + i * p.bias_stride_row;
    return r;
  }

  TILEWISE_DEVICE float bias_at(int64_t offset) const {
    return bias_value(bias, bias_dtype, offset);
  }

  // Value and derivative of the score, in natural units, for `raw` = q.k. The row must see the key:
  // outside the band bias has no element.
  TILEWISE_DEVICE Score::Capped<float> at(float raw, const RowScoreMod& row, int64_t key) const {
    const int32_t d = row.diagonal - static_cast<int32_t>(key);
    const float distance = static_cast<float>(d < 0 ? -d : d);
    const float b = bias != nullptr ? bias_at(row.bias + key) : 0.0f;
    return score.apply<DeviceMath>(raw, row.slope, distance, b);
  }

  // `key` is any key of the block.
  TILEWISE_DEVICE KeepFactors keep(const RowScoreMod& row, int64_t key) const {
    return {dropout.kept_keys<DeviceMath>(dropout_counter(row, key)), dropout.keep_scale};
  }
  TILEWISE_DEVICE PhiloxState<uint32_t> dropout_counter(const RowScoreMod& row, int64_t key) const {
    const auto block = static_cast<uint32_t>(key / Dropout::kKeysPerBlock);
    return dropout.counter(block, row.row, row.batch_head);
  }
};

}  // namespace tilewise::cuda
