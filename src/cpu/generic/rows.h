// The row-wise passes before and after the main kernels: combining splits, delta, and dq from
// its sum.
#pragma once

#include "attention/online_softmax.h"
#include "cpu/generic/engine.h"
#include "cpu/generic/lanes.h"

namespace tilewise::cpu {
namespace {

// Address of one packed row in `view`.
template <class T>
TILEWISE_FN T* packed_row(const Problem& p, const Sequence& s, int64_t kv_head, int64_t packed,
                          const tilewise_tensor& view) {
  const Packing packing{group_size(p)};
  return static_cast<T*>(view.data) + s.row_offset(view, packing.row(packed)) +
         (kv_head * packing.group + packing.head(packed)) * view.stride_head;
}

// out = sum of exp(lse_i - lse) out_i over the splits, in ascending order. The weights overwrite
// partial_lse.
template <class T>
void combine_item(const ForwardTask& t, int64_t splits, int64_t stride) {
  const Problem& p = *t.problem;
  const Packing packing{group_size(p)};
  for (int64_t i = 0; i < t.packed_rows.size(); ++i) {
    const int64_t packed = t.packed_rows.begin + i;
    const auto part = [&](int64_t split) {
      const int64_t at = split * stride + i;
      return LogSum{t.partial_lse[at], t.partial_low[at]};
    };
    LogSum base;
    for (int64_t split = 0; split < splits; ++split)
      if (base < part(split)) base = part(split);
    float sum = 0.0f;
    for (int64_t split = 0; split < splits; ++split) {
      const float weight = __builtin_expf(part(split).above(base));
      t.partial_lse[split * stride + i] = weight;
      sum += weight;
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const auto write_row = [&](auto* out) {
      for (int64_t c = 0; c < p.head_dim_v; c += W) {
        const int64_t now = min<int64_t>(W, p.head_dim_v - c);
        F total{};
        for (int64_t split = 0; split < splits; ++split) {
          const int64_t at = split * stride + i;
          const float weight = t.partial_lse[at] * inverse;
          const float* const out_part = t.partial_out + at * p.head_dim_v + c;
          // A split that saw no key holds 0; one with NaN must stay NaN, so none is skipped.
          total = total + (now == W ? load(out_part) : to_fp32_tail(out_part, now)) * weight;
        }
        if (now == W)
          from_fp32(out + c, total);
        else
          from_fp32_tail(out + c, total, now);
      }
    };
    with_out_type<T>(p, [&](auto type) {
      using Out = typename decltype(type)::type;
      write_row(packed_row<Out>(p, t.sequence, t.kv_head, packed, p.out));
    });
    const LogSum whole =
        sum == 0.0f ? LogSum{} : LogSum::of(base.lse, __builtin_logf(sum), base.low);
    write_lse(p, t.sequence, packing.row(packed), t.kv_head * packing.group + packing.head(packed),
              whole.lse, whole.low);
  }
}

template <class A, class B>
TILEWISE_FN float dot_rows(const A* a, const B* b, int64_t columns) {
  F sum{};
  int64_t i = 0;
  for (; i + W <= columns; i += W) sum = sum + to_fp32(a + i) * to_fp32(b + i);
  if (i < columns) sum = sum + to_fp32_tail(a + i, columns - i) * to_fp32_tail(b + i, columns - i);
  return sum_lanes(sum);
}

// The product of a row of out (or of its tangent) and a row of dout (or of its tangent).
template <class T>
TILEWISE_FN float dot_out(const RowTask& t, int64_t packed, const tilewise_tensor& out,
                          const tilewise_tensor& dout) {
  const Problem& p = *t.problem;
  float product = 0.0f;
  with_out_type<T>(p, [&](auto type) {
    using Out = typename decltype(type)::type;
    product = dot_rows(packed_row<const Out>(p, t.sequence, t.kv_head, packed, out),
                       packed_row<const T>(p, t.sequence, t.kv_head, packed, dout), p.head_dim_v);
  });
  return product;
}

// delta = do.o - dlse. With it ds = p (dp - delta) covers both incoming gradients. A sink has p =
// exp(sink - lse) and no value, so its ds is -p delta.
template <class T>
void delta_item(const RowTask& t) {
  const Problem& p = *t.problem;
  const Packing packing{group_size(p)};
  for (int64_t i = 0; i < t.packed_rows.size(); ++i) {
    const int64_t packed = t.packed_rows.begin + i;
    const int64_t row = packing.row(packed);
    const int64_t head = t.kv_head * packing.group + packing.head(packed);
    const float delta =
        dot_out<T>(t, packed, p.out, t.incoming.dout) - t.incoming.dlse_at(t.sequence, row, head);
    t.delta[i] = delta;
    if (t.dsinks == nullptr) continue;
    const LogSum sum = log_sum_of(p, t.sequence, row, head);
    const LogSum sink{p.sinks[head]};
    t.dsinks[i] = sum.lse == kMinusInfinity ? 0.0f : -__builtin_expf(sink.above(sum)) * delta;
  }
}

// The same for Pass::second: delta of the tangents of out and lse, and
// second_delta = do.o + do'.o' - dlse of the results. The sink's score and its tangent have the
// gradients of a key without a value.
template <class T>
void second_rows_item(const RowTask& t) {
  const Problem& p = *t.problem;
  const Tangents& tangents = *t.tangents;
  const Incoming results = Incoming::of(*t.gradients);
  const Packing packing{group_size(p)};
  for (int64_t i = 0; i < t.packed_rows.size(); ++i) {
    const int64_t packed = t.packed_rows.begin + i;
    const int64_t row = packing.row(packed);
    const int64_t head = t.kv_head * packing.group + packing.head(packed);
    t.delta[i] =
        dot_out<T>(t, packed, p.out, t.incoming.dout) - t.incoming.dlse_at(t.sequence, row, head);
    float delta = dot_out<T>(t, packed, tangents.out, t.incoming.dout) -
                  results.dlse_at(t.sequence, row, head);
    if (results.dout.data != nullptr) delta += dot_out<T>(t, packed, p.out, results.dout);
    t.second_delta[i] = delta;
    if (t.dsinks == nullptr) continue;
    const LogSum sum = log_sum_of(p, t.sequence, row, head);
    const LogSum sink{p.sinks[head]};
    const float tangent = tangents.sinks != nullptr ? tangents.sinks[head] : 0.0f;
    const float centred =
        tangent - tangents.lse[lse_tangent_index(tangents, t.sequence, row, head)];
    t.dsinks[i] = sum.lse == kMinusInfinity
                      ? 0.0f
                      : -__builtin_expf(sink.above(sum)) * (delta + centred * t.delta[i]);
  }
}

// dq = scale * sum, except that the sum of Pass::second contains the scale. This tile's share of
// dscale is the sum of q . dq_sum over its rows.
template <class E>
void finish_dq_item(const RowTask& t) {
  using T = typename E::Storage;
  constexpr Shape S = E::S;
  const Problem& p = *t.problem;
  const Gradients& g = *t.gradients;
  const Extent qk = extent_of(S, p.head_dim);
  const float scale = t.tangents != nullptr ? 1.0f : score_of(p).scale;
  double dscale = 0.0;
  for (int64_t first = 0; first < t.packed_rows.size(); first += W) {
    const int64_t valid = min<int64_t>(W, t.packed_rows.size() - first);
    float zeros[W] = {};
    const bool seen = t.dq_sum != nullptr;
    const float* const sums =
        seen ? t.dq_sum + first / S.panel * qk.m * S.panel + first % S.panel : zeros;
    const int64_t ld = seen ? S.panel : 0;
    if (g.dq.data != nullptr) {
      T* dq[W];
      for (int i = 0; i < valid; ++i)
        dq[i] = packed_row<T>(p, t.sequence, t.kv_head, t.packed_rows.begin + first + i, g.dq);
      store_lanes(dq, valid, sums, ld, p.head_dim, splat(scale));
    }
    if (t.dscale == nullptr || !seen) continue;
    for (int i = 0; i < valid; ++i) {
      const T* const q =
          packed_row<const T>(p, t.sequence, t.kv_head, t.packed_rows.begin + first + i, p.q);
      float share = 0.0f;
      for (int64_t c = 0; c < p.head_dim; ++c) share += to_float(q[c]) * sums[c * ld + i];
      dscale += static_cast<double>(share);
    }
  }
  if (t.dscale != nullptr) *t.dscale = static_cast<float>(dscale);
}

}  // namespace
}  // namespace tilewise::cpu
