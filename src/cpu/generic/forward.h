// The forward of one work item (FlashAttention-2, arXiv 2307.08691, algorithm 1), transposed: query
// rows are the vector lanes, so maxima, sums and masks are vertical and no head dimension needs a
// special case.
//
// Work item  tile_q or large_tile_q packed query rows of a key/value head, and the keys of a split.
// Loops      Key tiles, then panels of lanes (register blocks of the matrix engine), then strips of
//            keys: the scores of a strip become weights while they are in the L1 cache.
//
//   S^T[key][lane]  = K Q^T       K packed once per tile, Q^T once per work item
//   P^T             = 2^((S^T - m) c), m and l kept per lane (SoftmaxScaling)
//   O^T[dv][lane]  += V^T P^T
//
// Q^T, the packed K and V of one tile, one strip of S^T, the weights of one tile and O^T live in
// the scratch memory of the thread. While one tile is computed, the next one is prefetched into L2.
#pragma once

#include "cpu/generic/lane_mask.h"
#include "cpu/generic/products.h"
#include "cpu/generic/row_prefetch.h"
#include "cpu/generic/score_tile.h"
#include "cpu/generic/softmax.h"

namespace tilewise::cpu {
namespace {

// E: the engine, which fixes the storage type, the tile shape and the layout of the weights.
template <class E>
struct Forward : ForwardScratch {
  using T = typename E::Storage;
  static constexpr Shape S = E::S;
  static_assert(S.pair > 1 || S.strip == S.tile_k, "weights take the place of the tile's scores");
  static_assert(S.tile_k % S.strip == 0 && S.strip % Dropout::kKeysPerBlock == 0);

  const ForwardTask& task;
  const Problem& p;
  const Sequence& s;
  Lanes lanes;
  ScoreTile scores;
  const Dropout dropout;
  const T** rows;
  PackedProducts<E> products;
  SoftmaxScaling<T> scaling;
  LaneMask lane_mask;
  TileWalk walk;
  // Whether O of a panel holds sums yet; if not, the first product overwrites it.
  bool summed[ceil_div(S.large_tile_q, S.panel)] = {};
  RowPrefetcher<T> prefetch_k, prefetch_v;  // prefetch the next tile

  // Weights of a tile that have not been multiplied by V yet: those from key `begin` on.
  struct PendingWeights {
    int64_t begin;
    int64_t nonfinite_count;  // rows that were removed from V
  };

  TILEWISE_FN Forward(const ForwardTask& t, Arena& arena)
      : ForwardScratch(S, *t.problem, arena),
        task(t),
        p(*t.problem),
        s(t.sequence),
        lanes{ForwardScratch::lanes},
        scores{ForwardScratch::scores, &p, score_of(p, s.batch, t.kv_head)},
        dropout(dropout_of(p)),
        rows(reinterpret_cast<const T**>(ForwardScratch::rows)),
        products{*this, p},
        scaling(SoftmaxScaling<T>::of(scores.score, is_general(p, scores.score))),
        lane_mask{ForwardScratch::mask} {}

  // Loads Q^T and resets the row states and accumulators.
  TILEWISE_FN void begin() {
    lanes.fill(p, s, task.kv_head, task.packed_rows, S.panel);
    lane_mask.begin(p, s, task.kv_head, {lanes.row[0], lanes.row[lanes.count - 1] + 1}, task.keys);
    const bool negate = !scaling.general && scores.score.scale < 0.0f;

    const int64_t used_panels = ceil_div(lanes.count, S.panel);
    lane_rows(rows, lanes, used_panels * S.panel, s, p.q);
    products.load_queries(rows, used_panels, negate);
    for (int64_t lane = 0; lane < used_panels * S.panel; ++lane) {
      const SoftmaxState state = first_state(task, lanes.head[lane], scaling);
      m[lane] = state.m;
      l[lane] = state.l;
      if (rounding != nullptr) rounding[lane] = 0.0f;
      if (max_logits != nullptr) max_logits[lane] = kMinusInfinity;
    }
    for (bool& panel_has : summed) panel_has = false;
  }

  // Applies the score options and, if `masked`, the band: the panel does not see all keys of the
  // strip.
  TILEWISE_FN void change_scores(int64_t panel, Range strip, Range keys, bool masked) {
    for (int64_t lane = 0; lane < vectors(panel) * W; lane += W) {
      const Lanes::Bounds bounds = lanes.bounds(panel * S.panel + lane, keys);
      const I diagonal = ScoreTile::diagonal(s, lanes, panel * S.panel + lane, keys);
      float* at = s_tile + lane;
      for (int64_t i = strip.begin; i < strip.end; ++i, at += S.panel) {
        const int32_t key = static_cast<int32_t>(i);
        F value = load(at);
        if (scaling.general && key < keys.size())
          value = scores.at(value, diagonal, key, lane).value;
        if (masked) value = bounds.sees(key) ? value : splat(kMinusInfinity);
        store(at, value);
      }
    }
  }

  // Updates max_logits with the largest scale * q.k of a strip. This is a loop of its own, over
  // numbers in the L1 cache, so that the other loops stay the same.
  TILEWISE_FN void track_max_logits(int64_t panel, Range strip, Range keys, bool partial) {
    const float factor = scaling.general ? scores.score.scale : scaling.unit;
    for (int64_t lane = 0; lane < vectors(panel) * W; lane += W) {
      const Lanes::Bounds bounds = lanes.bounds(panel * S.panel + lane, keys);
      float* const highest_at = max_logits + panel * S.panel + lane;
      F highest = load(highest_at);
      const float* at = s_tile + lane;
      for (int64_t i = strip.begin; i < min(strip.end, keys.size()); ++i, at += S.panel) {
        const F logit = load(at) * factor;
        I raises = bounds.sees(static_cast<int32_t>(i)) & ((logit > highest) | (logit != logit));
        if (partial) raises = raises & lane_mask.sees(i, lane);
        highest = raises ? logit : highest;
      }
      store(highest_at, highest);
    }
  }

  TILEWISE_FN int64_t vectors(int64_t panel) const {
    return min<int64_t>(S.panel / W, ceil_div(lanes.count - panel * S.panel, W));
  }

  // Raises m where the maximum of the strip exceeds it by the threshold. l and O are then rescaled,
  // after the pending weights have been added to O.
  TILEWISE_FN F raise_maximum(int64_t panel, int64_t lane, Range strip, PendingWeights& pending) {
    float* const m_at = m + panel * S.panel + lane;
    const float* from = s_tile + lane;
    F highest_of[4];  // independent chains: max has a latency of four cycles
    for (F& chain : highest_of) chain = splat(kMinusInfinity);
    for (int64_t key = 0; key < strip.size(); key += 4, from += 4 * S.panel)
      for (int i = 0; i < 4; ++i) highest_of[i] = vmax(highest_of[i], load(from + i * S.panel));
    const F highest = vmax(vmax(highest_of[0], highest_of[1]), vmax(highest_of[2], highest_of[3]));
    const F old = load(m_at);
    const I outgrown = highest > old + kRescaleThreshold / scaling.c;
    if (any(outgrown)) {
      accumulate(panel, pending, strip.begin);
      const F raised = outgrown ? highest : old;
      const F factor = outgrown ? scaling.alpha(old, raised) : splat(1.0f);
      store(m_at, raised);
      for (float* const sums : {l, rounding})
        if (sums != nullptr) {
          float* const at = sums + panel * S.panel + lane;
          store(at, load(at) * factor);
        }
      float* o_at = o + panel * dv.m * S.panel + lane;
      for (int64_t d = 0; summed[panel] && d < dv.m; ++d, o_at += S.panel)
        store(o_at, load(o_at) * factor);
    }
    const F now = load(m_at);
    return scaling.base(now == kMinusInfinity ? F{} : now);
  }

  // P^T = 2^((S^T - m) c) for W lanes; l grows by the column sums before dropout, and `rounding` by
  // the errors of the weights after dropout as the engine stores them.
  template <bool kDropout, bool kFused, bool kRounding>
  TILEWISE_FN void exponentiate(int64_t panel, int64_t lane, Range strip, Range keys, F base) {
    F sum[4] = {};
    F added{};
    const SoftmaxScaling<T> w_of = scaling;
    KeepMask keep;
    const float* from = s_tile + lane;
    uint32_t* const to = weights;
    for (int64_t key = strip.begin; key < strip.end; key += 8, from += 8 * S.panel) {
      if (kDropout && key % Dropout::kKeysPerBlock == 0)
        keep = KeepMask::of(dropout, p, s, lanes, panel * S.panel + lane, keys.begin + key);
      for (int i = 0; i < 8; i += 2) {
        F w[2];
        for (int j = 0; j < 2; ++j) {
          w[j] = exp2<kExpDegree<T>>(
              w_of.template exponent<kFused>(load(from + (i + j) * S.panel), base));
          sum[(i + j) % 4] += w[j];
          if constexpr (kDropout) w[j] = w[j] * keep.scale(dropout, key + i + j);
        }
        E::store_weights_b(to, weights_plane, S.panel, key + i, lane, w[0], w[1]);
        if constexpr (kRounding) added += E::rounding_of_weights(w[0], w[1]);
      }
    }
    if constexpr (kRounding) {
      float* const rounding_at = rounding + panel * S.panel + lane;
      store(rounding_at, load(rounding_at) + added);
    }
    float* const l_at = l + panel * S.panel + lane;
    store(l_at, load(l_at) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }

  TILEWISE_FN void softmax_strip(int64_t panel, Range strip, Range keys, PendingWeights& pending) {
    for (int64_t lane = 0; lane < vectors(panel) * W; lane += W) {
      prefetch_k.prefetch();
      prefetch_v.prefetch();
      const F base = raise_maximum(panel, lane, strip, pending);
      if (scaling.fused())
        exponentiate_fused<SoftmaxScaling<T>::kMayFuse>(panel, lane, strip, keys, base);
      else
        exponentiate_fused<false>(panel, lane, strip, keys, base);
    }
  }
  template <bool kFused>
  TILEWISE_FN void exponentiate_fused(int64_t panel, int64_t lane, Range strip, Range keys,
                                      F base) {
    if (dropout.on())
      exponentiate_dropped<true, kFused>(panel, lane, strip, keys, base);
    else
      exponentiate_dropped<false, kFused>(panel, lane, strip, keys, base);
  }
  template <bool kDropout, bool kFused>
  TILEWISE_FN void exponentiate_dropped(int64_t panel, int64_t lane, Range strip, Range keys,
                                        F base) {
    if (rounding != nullptr)
      exponentiate<kDropout, kFused, (S.pair > 1)>(panel, lane, strip, keys, base);
    else
      exponentiate<kDropout, kFused, false>(panel, lane, strip, keys, base);
  }

  // O^T += V^T P^T, plus the rows that were removed from V where their weight is not 0.
  TILEWISE_FN void accumulate(int64_t panel, PendingWeights& pending, int64_t end) {
    const Range now = {pending.begin, end};
    if (now.empty()) return;
    pending.begin = end;
    products.accumulate(panel, now, vectors(panel), summed[panel]);
    summed[panel] = true;
    float* const o_panel = o + panel * dv.m * S.panel;
    for (int64_t b = 0; b < pending.nonfinite_count; ++b) {
      if (!now.contains(nonfinite_v.index[b])) continue;
      for (int64_t lane = 0; lane < vectors(panel) * W; ++lane) {
        const float w = E::weight_b(weights, weights_plane, S.panel, nonfinite_v.index[b], lane);
        if (w == 0.0f) continue;
        for (int64_t d = 0; d < p.head_dim_v; ++d)
          o_panel[d * S.panel + lane] +=
              w * to_float(static_cast<const T*>(nonfinite_v.address[b])[d]);
      }
    }
  }

  // Processes the keys of a tile for one panel, strip by strip: scores become weights while they
  // are in the cache.
  TILEWISE_FN void attend(int64_t panel, Range keys, Coverage coverage, int64_t nonfinite_count) {
    const Tiling strips{padded(keys), S.strip};
    PendingWeights pending{0, nonfinite_count};
    const bool partial = coverage == Coverage::partial;
    if (scaling.general) scores.load_panel(s, lanes, panel * S.panel, S.panel, keys, 0);
    if (partial) lane_mask.load(lanes, panel * S.panel, S.panel, keys, 0);
    for (int64_t i = 0; i < strips.count(); ++i) {
      const Range strip = strips.at(i);
      const Range seen = {keys.begin + strip.begin, keys.begin + strip.end};
      const bool masked = seen.end > keys.end || !lanes.panel_covers(panel, seen);
      products.scores(panel, strip, vectors(panel));
      if (max_logits != nullptr) track_max_logits(panel, strip, keys, partial);
      if (scaling.general || masked) change_scores(panel, strip, keys, masked);
      if (partial) lane_mask.hide(s_tile, S.panel, strip, keys, vectors(panel) * W);
      softmax_strip(panel, strip, keys, pending);
    }
    accumulate(panel, pending, strips.length);
  }

  TILEWISE_FN void run() {
    for (bool again = false;; again = true) {
      attend_all();
      const bool more = !again && mark_huge();
      finish(again);
      if (!more) break;
      scaling = SoftmaxScaling<T>::of(scores.score, true);
    }
    for (int64_t lane = 0; max_logits != nullptr && lane < lanes.count; ++lane)
      merge_max_logit(p.max_logits + s.batch * p.heads_q + lanes.head[lane], max_logits[lane]);
  }

  // Marks the rows to recompute in the general form. The other rows are not affected by them.
  TILEWISE_FN bool mark_huge() {
    bool found = false;
    for (int64_t lane = 0; lane < round_up(lanes.count, W); lane += W) {
      const I marked = scaling.huge(load(m + lane), load(l + lane));
      for (int i = 0; i < W; ++i) huge[lane + i] = marked[i] != 0;
      found |= any(marked);
    }
    return found;
  }

  TILEWISE_FN void attend_all() {
    begin();
    const int64_t used_panels = ceil_div(lanes.count, S.panel);
    const Range seen = intersect(lanes.all_lanes_any(S.panel), task.keys);
    const Tiling tiling{s.band.keys, S.tile_k};
    walk = lane_mask.walk(lanes, S.panel, tiling, seen);
    for (int64_t j = walk.first(); j < walk.end(); j = walk.after(j)) {
      const Range keys = intersect(tiling.at(j), task.keys);
      const bool nonfinite = load_tile(j, keys, used_panels) > 0;
      const int64_t next = walk.after(j);
      if (next < walk.end()) start_prefetch(intersect(tiling.at(next), task.keys), used_panels);
      for (int64_t first = 0; first < used_panels; first += kGroup) {
        const Range group = {first, min(first + kGroup, used_panels)};
        const int64_t nonfinite_count = nonfinite ? load_values(j, keys, group) : 0;
        for (int64_t i = group.begin; i < group.end; ++i) {
          const Coverage coverage = walk.of(j, i);
          if (!lanes.panel_sees(i, keys) || coverage == Coverage::none) continue;
          // On the diagonal a panel stops at the last key it sees, not at the end of the tile.
          attend(i, {keys.begin, min(keys.end, lanes.any[i].end)}, coverage, nonfinite_count);
        }
      }
    }
  }

  // Panels of the smallest work item: the sums of a row must not depend on the rows next to it.
  static constexpr int64_t kGroup = S.tile_q / S.panel;

  TILEWISE_FN bool covers(int64_t j, Range group, Range keys) const {
    bool all = true;
    for (int64_t i = group.begin; i < group.end; ++i)
      all &= lanes.panel_covers(i, keys) && walk.of(j, i) == Coverage::full;
    return all;
  }

  // Prepares the prefetch of the next tile's keys and values.
  TILEWISE_FN void start_prefetch(Range keys, int64_t used_panels) {
    if (task.packed != nullptr || p.kv_float8 != 0) return;
    const T** const k_rows = reinterpret_cast<const T**>(next_rows);
    const T** const v_rows = k_rows + S.tile_k;
    key_rows(k_rows, keys, keys.size(), s.kv, p.k, task.kv_head);
    key_rows(v_rows, keys, keys.size(), s.kv, p.v, task.kv_head);
    const int64_t calls = used_panels * (S.panel / W) * (S.tile_k / S.strip);
    prefetch_k = RowPrefetcher<T>(k_rows, keys.size(), p.head_dim, calls);
    prefetch_v = RowPrefetcher<T>(v_rows, keys.size(), p.head_dim_v, calls);
  }

  // Loads K and V of key tile j; returns how many rows of V were removed.
  TILEWISE_FN int64_t load_tile(int64_t j, Range keys, int64_t used_panels) {
    const int64_t packed_keys = padded(keys);
    const Range group = {0, used_panels};
    if (task.packed != nullptr && (task.nonfinite[j] == 0 || covers(j, group, keys))) {
      products.use(task.packed + j * packed_tile_units(S, p), packed_keys);
      return 0;
    }
    keys_of(rows, wide_k, keys, packed_keys, p, s, p.k, task.kv_head, p.head_dim);
    products.load_keys(rows, packed_keys);
    return load_values(j, keys, group);
  }

  // Loads V for these panels, without the non-finite rows if a lane does not see all keys.
  TILEWISE_FN int64_t load_values(int64_t j, Range keys, Range group) {
    const int64_t packed_keys = padded(keys);
    keys_of(rows, wide_v, keys, packed_keys, p, s, p.v, task.kv_head, p.head_dim_v);
    const int64_t nonfinite_count =
        covers(j, group, keys)
            ? 0
            : remove_nonfinite_rows(rows, keys.size(), p.head_dim_v, nonfinite_v);
    products.load_values(rows, packed_keys);
    return nonfinite_count;
  }

  // Keys are padded to whole register blocks (as rows of C) and whole units (as contraction), and
  // to groups of 8 for dropout.
  TILEWISE_FN static constexpr int64_t padded(Range keys) {
    return round_up(keys.size(), PackedProducts<E>::kKeyStep);
  }

  // out = O / l, where l may be that of the rounded weights, and lse = m + log(l), lane by lane,
  // either of the huge rows or of all others.
  TILEWISE_FN void finish(bool of_huge) {
    const int64_t used_panels = ceil_div(lanes.count, S.panel);
    for (int64_t panel = 0; panel < used_panels; ++panel) {
      for (int64_t i = 0; !summed[panel] && i < dv.m * S.panel; ++i)
        o[panel * dv.m * S.panel + i] = 0.0f;
      for (int64_t lane = 0; lane < vectors(panel) * W; lane += W)
        finish_lanes(panel, lane, of_huge);
    }
  }

  TILEWISE_FN void finish_lanes(int64_t panel, int64_t lane, bool of_huge) {
    const int64_t first = panel * S.panel + lane;
    const int64_t valid = min<int64_t>(W, lanes.count - first);
    const F sum = load(l + first);
    const F divisor = rounding == nullptr ? sum : sum + load(rounding + first) / dropout.keep_scale;
    const F inverse = sum == 0.0f ? F{} : v_descale(p, s.batch, task.kv_head) / divisor;
    const LogSums sums = lse_of(load(m + first), sum, scaling);
    const float* const o_lanes = o + panel * dv.m * S.panel + lane;
    // Calls address(lane, i) for each of the lanes to write, and stores them there.
    const auto store_rows = [&](auto type, const auto& address) {
      typename decltype(type)::type* to[W] = {};
      for (int i = 0; i < valid; ++i)
        if (huge[first + i] == of_huge) to[i] = address(first + i, i);
      store_lanes(to, valid, o_lanes, S.panel, p.head_dim_v, inverse);
    };
    if (task.partial_out != nullptr)
      return store_rows(std::type_identity<float>{}, [&](int64_t at, int i) {
        task.partial_lse[at] = sums.lse[i];
        task.partial_low[at] = sums.low[i];
        return task.partial_out + at * p.head_dim_v;
      });
    with_out_type<T>(p, [&](auto type) {
      store_rows(type, [&](int64_t at, int i) {
        write_lse(p, s, lanes.row[at], lanes.head[at], sums.lse[i], sums.low[i]);
        return row_of<typename decltype(type)::type>(p.out, at);
      });
    });
  }

  template <class Row>
  TILEWISE_FN Row* row_of(const tilewise_tensor& view, int64_t lane) const {
    return static_cast<Row*>(view.data) + s.row_offset(view, lanes.row[lane]) +
           lanes.head[lane] * view.stride_head;
  }
};

template <class E>
void pack_item(const PackTask& task, Arena scratch) {
  using T = typename E::Storage;
  constexpr Shape S = E::S;
  const Problem& p = *task.problem;
  const Extent qk = extent_of(S, p.head_dim);
  const Extent dv = extent_of(S, p.head_dim_v);
  const int64_t count = Forward<E>::padded(task.keys);
  const int64_t k_plane = S.tile_k * qk.ld;
  const T** const rows = scratch.take<const T*>(S.tile_k);
  const WideScratch wide_k(p, S.tile_k, p.head_dim, scratch);
  const WideScratch wide_v(p, S.tile_k, p.head_dim_v, scratch);
  keys_of(rows, wide_k, task.keys, count, p, task.sequence, p.k, task.kv_head, p.head_dim);
  pack_columns<E>(task.packed, qk.ld, k_plane, rows, count, p.head_dim);
  keys_of(rows, wide_v, task.keys, count, p, task.sequence, p.v, task.kv_head, p.head_dim_v);
  E::pack_rows_a(task.packed + S.parts * k_plane, dv.m_ld, S.tile_k / S.pair * dv.m_ld, rows, count,
                 p.head_dim_v);
  bool finite = true;
  for (int64_t i = 0; i < task.keys.size(); ++i) finite &= row_is_finite(rows[i], p.head_dim_v);
  *task.nonfinite = finite ? 0 : 1;
}

template <class E>
void forward_item(const ForwardTask& task, Arena scratch) {
  [[maybe_unused]] const typename E::Session session{};
  Forward<E> forward(task, scratch);
  forward.run();
}

}  // namespace
}  // namespace tilewise::cpu
