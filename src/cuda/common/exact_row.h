// One row of a forward by one warp: an online softmax in fp32 over the row's keys, one key per lane
// at a time, read from q, k and v in global memory. It works for scores of any size. The fast
// kernels call it for a row whose own sums overflowed or lost their precision (`needs_recompute` of
// forward_results.h), which is rare; it is slow.
#pragma once

#include <cfloat>
#include <type_traits>

#include "attention/mask.h"
#include "base/float8.h"
#include "cuda/common/block.h"
#include "cuda/common/combine_weights.h"
#include "cuda/common/out.h"
#include "cuda/common/score_mod.h"
#include "cuda/form.h"
#include "cuda/params.h"

namespace tilewise::cuda::common {

// T: storage of q, K: of k and v. Form::plain has no softcap, ALiBi, bias or dropout, and an out of
// the type of q. Without kReadsMask there is no mask, and none is given.
template <class T, class K, Form kForm, bool kReadsMask = false>
class ExactRow {
 public:
  // Row `row` of sequence `s`, query head `head`.
  TILEWISE_DEVICE ExactRow(const Problem& p, const Sequence& s, int64_t row, int64_t head,
                           const tilewise_mask* mask = nullptr)
      : p_(p),
        mask_(mask),
        s_(s),
        keys_(s.band.keys_of(row)),
        row_(row),
        head_(head),
        kv_head_(head / group_size(p)),
        q_(static_cast<const T*>(p.q.data) + s.row_offset(p.q, row) + head * p.q.stride_head),
        score_mod_(ScoreMod::of(p)),
        row_score_mod_(ScoreMod::row(p, s, row, head)) {
    score_mod_.score = score_of(p, s.batch, kv_head_);
  }

  // Writes the row of out and its lse. The softmax runs again for every 128 columns, because a
  // kernel has the registers of all functions that it may call.
  TILEWISE_DEVICE void write() {
    int64_t first = 0;
    do {
      write_columns(first);
      first += kColumns * ptx::kWarpSize;
    } while (first < p_.head_dim_v);
  }

 private:
  static constexpr int kColumns = 4;  // of a lane, at a time

  TILEWISE_DEVICE void write_columns(int64_t first) {
    m_ = -FLT_MAX;  // not -inf: -inf - -inf would be NaN
    l_ = 0.0f;
#pragma unroll
    for (float& o : o_) o = 0.0f;
    first_column_ = first + ptx::lane_index();
#pragma unroll 1
    for (int64_t key = keys_.begin; key < keys_.end; key += ptx::kWarpSize) {
      if constexpr (kForm == Form::general)
        call_add_keys(key);
      else
        add_keys(key);
    }
    const float l = sum_of_warp(l_);
    const float sink = p_.sinks != nullptr ? p_.sinks[head_] : kMinusInfinity;
    const LogSum sink_lse{sink, 0.0f};
    LogSum keys_lse;
    if (l != 0.0f) keys_lse = LogSum::of(m_, ptx::log_accurate(l));
    LogSum base = keys_lse < sink_lse ? sink_lse : keys_lse;
    base.lse = exponent_base(base.lse);
    const float weight = exponential(keys_lse.above(base));
    const float total = weight + exponential(sink_lse.above(base));
    const float factor =
        l == 0.0f ? 0.0f : weight / (total * l) * v_descale(p_, s_.batch, kv_head_);
    write_out(factor);
    if (p_.lse == nullptr || first_column_ != 0) return;
    LogSum sum;
    if (total != 0.0f) sum = LogSum::of(base.lse, ptx::log_accurate(total), base.low);
    const int64_t at = s_.lse_offset(p_.lse_stride_batch, row_) + head_ * p_.lse_stride_head;
    p_.lse[at] = sum.lse;
    if (p_.lse_low != nullptr) p_.lse_low[at] = sum.low;
  }

  TILEWISE_DEVICE void write_out(float factor) const {
    const auto write = [&](auto* out) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int64_t column = first_column_ + i * ptx::kWarpSize;
        if (column < p_.head_dim_v)
          out[column] = rounded<std::remove_reference_t<decltype(*out)>>(o_[i] * factor);
      }
    };
    const int64_t at = s_.row_offset(p_.out, row_) + head_ * p_.out.stride_head;
    if constexpr (kForm == Form::general)
      with_out<T>(p_, at, write);
    else
      write(static_cast<T*>(p_.out.data) + at);
  }

  // Continues the online softmax with up to 32 keys, one per lane.
  TILEWISE_DEVICE void add_keys(int64_t first) {
    const int64_t key = first + ptx::lane_index();
    float x = kMinusInfinity;
    if (key < keys_.end) x = score(key);
    const float highest = ptx::fmax(m_, max_of_warp(x));
    const float shrink = exponential(m_ - highest);
    float weight = exponential(x - highest);
    m_ = highest;
    l_ = l_ * shrink + weight;
#pragma unroll
    for (float& o : o_) o *= shrink;
    if constexpr (kForm == Form::general) {
      if (score_mod_.dropout.on()) weight *= score_mod_.keep(row_score_mod_, key).at(key);
    }
    if (!ptx::any(weight != 0.0f)) return;  // NaN is not 0
#pragma unroll 1
    for (int i = 0; i < min<int64_t>(ptx::kWarpSize, keys_.end - first); ++i) {
      const float key_weight = ptx::shuffle(weight, i);
      if (key_weight != 0.0f) add_value(first + i, key_weight);
    }
  }

  // The same as a call, which takes 20 fewer registers: the combine kernels have few.
  TILEWISE_COLD void call_add_keys(int64_t first) { add_keys(first); }

  TILEWISE_DEVICE const K* row_of(const tilewise_tensor& view, int64_t key) const {
    return static_cast<const K*>(view.data) + s_.kv.offset(view, key) + kv_head_ * view.stride_head;
  }

  // Whether the mask shows the key to the row.
  TILEWISE_COLD bool is_shown(int64_t key) const {
    return Mask::of(mask_, s_.batch).shows(head_, row_, key);
  }

  TILEWISE_DEVICE float score(int64_t key) const {
    if constexpr (kReadsMask) {
      if (is_given(*mask_) && !is_shown(key)) return kMinusInfinity;
    }
    if constexpr (kForm == Form::general) {
      if (score_mod_.bias != nullptr &&
          score_mod_.bias_at(row_score_mod_.bias + key) == kMinusInfinity)
        return kMinusInfinity;
    }
    const K* const k = row_of(p_.k, key);
    float product = 0.0f;
#pragma unroll 1
    for (int64_t i = 0; i < p_.head_dim; ++i)
      product = ptx::fma(to_float(q_[i]), to_float(k[i]), product);
    if constexpr (kForm == Form::general) return score_mod_.at(product, row_score_mod_, key).value;
    return ptx::mul(product, score_mod_.score.scale);
  }

  TILEWISE_DEVICE void add_value(int64_t key, float weight) {
    const K* const v = row_of(p_.v, key);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = first_column_ + i * ptx::kWarpSize;
      if (column < p_.head_dim_v) o_[i] = ptx::fma(weight, to_float(v[column]), o_[i]);
    }
  }

  const Problem& p_;
  const tilewise_mask* const mask_;
  const Sequence& s_;
  const Range keys_;
  const int64_t row_;
  const int64_t head_;
  const int64_t kv_head_;
  const T* const q_;
  ScoreMod score_mod_;
  const RowScoreMod row_score_mod_;
  float m_;
  float l_;               // sum over the keys of this lane
  int64_t first_column_;  // of this lane, which also has every 32nd column after it
  float o_[kColumns];
};

// Computes and writes one row. With 16-bit q, the cache may be float8.
template <class T, Form kForm>
TILEWISE_COLD void write_exact_row(const Problem& p, const tilewise_mask& mask, const Sequence& s,
                                   int64_t row, int64_t head) {
  if constexpr (sizeof(T) == 2) {
    if (p.kv_float8 != 0) return ExactRow<T, Float8, kForm, true>(p, s, row, head, &mask).write();
  }
  ExactRow<T, T, kForm, true>(p, s, row, head, &mask).write();
}

}  // namespace tilewise::cuda::common
