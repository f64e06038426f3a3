// One row of a plain forward, computed by a warp from the inputs, in fp32 and for scores of any
// size. It is for rows that a faster kernel has given up: rare, and slow.
#pragma once

#include <cfloat>

#include "cuda/common/block.h"
#include "cuda/common/places.h"
#include "cuda/common/split_weights.h"

namespace tilewise::cuda::common {

// T: storage of q, k, v and out. Plain: a scale, a band and sinks, and no pages.
template <class T>
class ExactRow {
 public:
  TILEWISE_DEVICE ExactRow(const Problem& p, const Place& place, int64_t head)
      : p_(p),
        sequence_(sequence_of(p, place.batch)),
        keys_(sequence_.band.keys_of(place.index)),
        kv_head_(head / group_size(p)),
        q_(static_cast<const T*>(p.q.data) + place.offset(p.q) + head * p.q.stride_head),
        scale_(score_of(p).scale) {}

  // Writes the row; returns its lse.
  TILEWISE_DEVICE LogSum write(T* out, float sink) {
#pragma unroll 1
    for (int64_t key = keys_.begin; key < keys_.end; key += ptx::kWarpSize) add_keys(key);
    LogSum sum;
    if (m_ != kNothing) {
      sum = LogSum::of(m_, ptx::log_accurate(sum_of_warp(l_)));
    }
    SplitWeights weights;
    weights.base = sum < LogSum{sink, 0.0f} ? LogSum{sink, 0.0f} : sum;
    weights.base.lse = exponent_base(weights.base.lse);
    const float all = weights.beside(sum) + weights.beside({sink, 0.0f});
    const float factor = all == 0.0f ? 0.0f : weights.beside(sum) / (all * sum_of_warp(l_));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = ptx::lane_index() + i * ptx::kWarpSize;
      if (column < p_.head_dim_v) out[column] = rounded<T>(m_ == kNothing ? 0.0f : o_[i] * factor);
    }
    if (all == 0.0f) return {};
    return LogSum::of(weights.base.lse, ptx::log_accurate(all), weights.base.low);
  }

 private:
  static constexpr int kColumns = 256 / ptx::kWarpSize;  // of a lane: of head dims up to 256
  static constexpr float kNothing = -FLT_MAX;            // m of a row that has seen no key

  // The online softmax goes on by a key of each lane.
  TILEWISE_DEVICE void add_keys(int64_t first) {
    const int64_t own = first + ptx::lane_index();
    float x = kMinusInfinity;
    if (own < keys_.end) x = score(own);
    const float highest = max(m_, max_of_warp(x));
    const float shrink = exponential(m_ - highest);
    const float weight = exponential(x - highest);
    m_ = highest;
    l_ = l_ * shrink + weight;
#pragma unroll
    for (float& o : o_) o *= shrink;
#pragma unroll 1
    for (int i = 0; i < min<int64_t>(ptx::kWarpSize, keys_.end - first); ++i) {
      const float its = ptx::shuffle(weight, i);
      if (its != 0.0f) add_value(first + i, its);
    }
  }

  TILEWISE_DEVICE float score(int64_t key) const {
    const T* const k = static_cast<const T*>(p_.k.data) + sequence_.kv.offset(p_.k, key) +
                       kv_head_ * p_.k.stride_head;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = 0; i < p_.head_dim; ++i) sum = ptx::fma(to_float(q_[i]), to_float(k[i]), sum);
    return ptx::mul(sum, scale_);
  }

  TILEWISE_DEVICE void add_value(int64_t key, float weight) {
    const T* const v = static_cast<const T*>(p_.v.data) + sequence_.kv.offset(p_.v, key) +
                       kv_head_ * p_.v.stride_head;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = ptx::lane_index() + i * ptx::kWarpSize;
      if (column < p_.head_dim_v) o_[i] = ptx::fma(weight, to_float(v[column]), o_[i]);
    }
  }

  const Problem& p_;
  const Sequence sequence_;
  const Range keys_;
  const int64_t kv_head_;
  const T* q_;
  const float scale_;
  float m_ = kNothing;
  float l_ = 0.0f;  // over the keys of this lane
  float o_[kColumns] = {};
};

}  // namespace tilewise::cuda::common
