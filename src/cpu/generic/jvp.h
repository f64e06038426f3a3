// Tangents of out and lse of one work item, transposed as the forward: query rows are the lanes.
//
// Work item  S.tile_q packed query rows of a key/value head, and all keys that they see.
// Loops      Tiles of S.strip keys, then panels of lanes.
//
//   S^T = K Q^T        P^T = exp(scale S^T - lse)
//   X'^T = K Q'^T + K' Q^T, and from it the tangents s' of the scores (ScoreTangents)
//   W^T = P^T (s' - r)                r per row
//   O'^T += V^T W^T + V'^T P^T        u += W
//   lse' = r + u                      out' = O' - u out
//
// The last line holds for every r, because the weights sum to 1. r is the mean of s' over the first
// tile that a row sees: what the tangents of all keys share, such as the tangent of a time
// embedding, then never enters W, whose rounding it would dominate.
//
// lse is known, so there is no maximum to keep. Products whose tangent is absent are left out.
#pragma once

#include "cpu/generic/lane_mask.h"
#include "cpu/generic/products.h"
#include "cpu/generic/score_tangents.h"

namespace tilewise::cpu {
namespace {

template <class E>
struct Jvp : JvpScratch {
  using T = typename E::Storage;
  static constexpr Shape S = E::S;
  static constexpr int64_t kKeyStep = PackedProducts<E>::kKeyStep;
  static_assert(S.strip % kKeyStep == 0 && S.strip % Dropout::kKeysPerBlock == 0);

  const JvpTask& task;
  const Problem& p;
  const Tangents& t;
  const Sequence& s;
  Lanes lanes;
  ScoreTile scores;
  RowWeights weights;
  ScoreTangents tangents;
  const Dropout dropout;
  LaneMask lane_mask;
  const T** rows;
  int64_t tile_keys = 0;  // of the loaded tile, padded
  int64_t nonfinite_count = 0;
  int64_t nonfinite_tangent_count = 0;

  TILEWISE_FN Jvp(const JvpTask& a_task, Arena& arena)
      : JvpScratch(S, *a_task.problem, *a_task.tangents, arena),
        task(a_task),
        p(*task.problem),
        t(*task.tangents),
        s(task.sequence),
        lanes{JvpScratch::lanes},
        scores{JvpScratch::scores, &p, score_of(p)},
        weights(JvpScratch::weights, p, scores.score),
        tangents(JvpScratch::bias_tangent, p, t, scores.score),
        dropout(dropout_of(p)),
        lane_mask{JvpScratch::mask},
        rows(reinterpret_cast<const T**>(JvpScratch::rows)) {}

  TILEWISE_FN int64_t used_panels() const { return ceil_div(lanes.count, S.panel); }
  TILEWISE_FN int64_t vectors(int64_t panel) const {
    return min<int64_t>(S.panel / W, ceil_div(lanes.count - panel * S.panel, W));
  }
  TILEWISE_FN static int64_t padded(Range keys) { return round_up(keys.size(), kKeyStep); }

  TILEWISE_FN void load_queries(uint32_t* to, const tilewise_tensor& view) {
    if (view.data == nullptr) return;
    lane_rows(rows, lanes, used_panels() * S.panel, s, view);
    for (int64_t i = 0; i < used_panels(); ++i)
      pack_columns_transposed<E>(to + i * qk.units * S.panel, S.panel, q_plane, rows + i * S.panel,
                                 S.panel, p.head_dim, qk.units);
  }

  TILEWISE_FN void begin() {
    lanes.fill(p, s, task.kv_head, task.packed_rows, S.panel);
    const Range of_lanes = {lanes.row[0], lanes.row[lanes.count - 1] + 1};
    lane_mask.begin(p, s, task.kv_head, of_lanes, {0, s.band.keys});
    load_queries(q, p.q);
    load_queries(q_tangent, t.q);
    for (int64_t lane = 0; lane < used_panels() * S.panel; ++lane) {
      const int64_t at = min(lane, lanes.count - 1);
      weights.load_row(s, lane, lanes.row[at], lanes.head[at]);
      reference[lane] = 0.0f;
      has_reference[lane] = 0;
      mean[lane] = 0.0f;
    }
    for (int64_t i = 0; i < used_panels() * dv.m * S.panel; ++i) o[i] = 0.0f;
  }

  TILEWISE_FN void load_keys(uint32_t* to, const tilewise_tensor& view, Range keys) {
    if (view.data == nullptr) return;
    key_rows(rows, keys, tile_keys, s.kv, view, task.kv_head);
    pack_columns<E>(to, qk.ld, k_plane, rows, tile_keys, p.head_dim);
  }
  // Returns how many rows with Inf or NaN were removed.
  TILEWISE_FN int64_t load_values(uint32_t* to, const tilewise_tensor& view, Range keys,
                                  const RowScratch& removed) {
    if (view.data == nullptr) return 0;
    key_rows(rows, keys, tile_keys, s.kv, view, task.kv_head);
    const int64_t count = remove_nonfinite_rows(rows, keys.size(), p.head_dim_v, removed);
    E::pack_rows_a(to, dv.m_ld, v_plane, rows, tile_keys, p.head_dim_v);
    return count;
  }
  TILEWISE_FN void load_tile(Range keys) {
    tile_keys = padded(keys);
    load_keys(k, p.k, keys);
    load_keys(k_tangent, t.k, keys);
    nonfinite_count = load_values(v, p.v, keys, nonfinite_v);
    nonfinite_tangent_count = load_values(v_tangent, t.v, keys, nonfinite_v_tangent);
  }

  // How much of a key tile the lanes of a panel see.
  struct Visible {
    bool masked;   // not all of it
    bool partial;  // not all of it, because of the mask
  };

  // W lanes of a panel against the keys of a tile.
  template <bool kPlain>
  struct Column {
    const Jvp& j;
    int64_t lane;  // of the panel
    RowWeights::OfLanes row;
    Lanes::Bounds bounds;
    I diagonal;
    Visible visible;
    bool has_products;

    TILEWISE_FN Column(const Jvp& jvp, int64_t first, int64_t a_lane, Range keys, Visible seen)
        : j(jvp),
          lane(a_lane),
          row(j.weights.template of_lanes<kPlain>(first)),
          bounds(kPlain ? Lanes::Bounds{} : j.lanes.bounds(first, keys)),
          diagonal(kPlain ? I{} : ScoreTile::diagonal(j.s, j.lanes, first, keys)),
          visible(seen),
          has_products(j.tangents.of_products()) {}

    // The weight of a key and the tangent of its score; both are 0 where the lane does not see it.
    TILEWISE_FN ScoreTangents::Element at(int32_t key) const {
      const int64_t from = key * S.panel + lane;
      const F raw_tangent = has_products ? load(j.x_tile + from) : F{};
      ScoreTangents::Element e = j.tangents.template at<T, kPlain>(
          j.scores, j.weights, row, load(j.s_tile + from), raw_tangent, diagonal, key, lane);
      if (!kPlain && visible.masked) {
        I sees = bounds.sees(key);
        if (visible.partial) sees &= j.lane_mask.sees(key, lane);
        e.weight = sees ? e.weight : F{};
        e.tangent = sees ? e.tangent : F{};
      }
      return e;
    }
  };

  // r of the lanes that see keys for the first time: the mean of s' over the tile.
  template <bool kPlain>
  TILEWISE_FN void set_reference(const Column<kPlain>& column, int64_t first, int64_t count) {
    const I known = load_as<I>(has_reference + first);
    if (!any(~known)) return;
    F total{};
    F sum{};
    for (int32_t key = 0; key < count; ++key) {
      const ScoreTangents::Element e = column.at(key);
      total += e.weight;
      sum += e.weight * e.tangent;
    }
    const I found = total > 0.0f;
    store(reference + first, ~known & found ? sum / total : load(reference + first));
    store_as(has_reference + first, known | found);
  }

  // P^T and W^T of W lanes from S^T and X'^T.
  template <bool kPlain, bool kDropout>
  TILEWISE_FN void weigh_lanes(int64_t panel, int64_t lane, Range keys, Visible visible) {
    const int64_t first = panel * S.panel + lane;
    const Column<kPlain> column(*this, first, lane, keys, visible);
    if (tangents.any()) set_reference(column, first, padded(keys));
    const F r = load(reference + first);
    const bool has_values = t.v.data != nullptr;
    F sum[2] = {};
    KeepMask keep;
    for (int32_t key = 0; key < padded(keys); key += 2) {
      F p2[2];
      F w2[2];
      for (int i = 0; i < 2; ++i) {
        if (kDropout && (key + i) % Dropout::kKeysPerBlock == 0)
          keep = KeepMask::of(dropout, p, s, lanes, first, keys.begin + key + i);
        const ScoreTangents::Element e = column.at(key + i);
        p2[i] = e.weight;
        w2[i] = e.weight * (e.tangent - r);
        sum[i] += w2[i];
        if constexpr (kDropout) {
          const F kept = keep.scale(dropout, key + i);
          p2[i] = p2[i] * kept;
          w2[i] = w2[i] * kept;
        }
      }
      if (has_values) E::store_weights_b(p_b, weights_plane, S.panel, key, lane, p2[0], p2[1]);
      E::store_weights_b(w_b, weights_plane, S.panel, key, lane, w2[0], w2[1]);
    }
    store(mean + first, load(mean + first) + (sum[0] + sum[1]));
  }

  TILEWISE_FN void weigh(int64_t panel, Range keys, bool partial) {
    const bool general = weights.general;
    const Visible visible = {
        partial || keys.size() != padded(keys) || !lanes.panel_covers(panel, keys), partial};
    if (partial) lane_mask.load(lanes, panel * S.panel, S.panel, keys, 0);
    if (general) scores.load_panel(s, lanes, panel * S.panel, S.panel, keys, 0);
    tangents.load_panel(s, lanes, panel * S.panel, S.panel, keys, 0);
    for (int64_t lane = 0; lane < vectors(panel) * W; lane += W) {
      if (dropout.on())
        weigh_lanes<false, true>(panel, lane, keys, visible);
      else if (general || visible.masked || !weights.all_plain)
        weigh_lanes<false, false>(panel, lane, keys, visible);
      else
        weigh_lanes<true, false>(panel, lane, keys, visible);
    }
  }

  TILEWISE_FN void score_product(float* to, bool adds, const uint32_t* keys,
                                 const uint32_t* queries, int64_t panel, int64_t count) {
    E::gemm(to, S.panel, adds, {keys, qk.ld, 1, k_plane}, count,
            {queries + panel * qk.units * S.panel, S.panel, q_plane}, vectors(panel), qk.units);
  }

  // O'^T += V^T W^T, plus the rows that were removed from V where their weight is not 0.
  TILEWISE_FN void value_product(int64_t panel, const uint32_t* values, const uint32_t* w,
                                 int64_t count, const RowScratch& removed, int64_t removed_count) {
    float* const o_panel = o + panel * dv.m * S.panel;
    E::gemm(o_panel, S.panel, true, E::rows_a(values, dv.m_ld, tile_keys, v_plane), dv.m,
            {w, S.panel, weights_plane}, vectors(panel), count / S.pair);
    for (int64_t b = 0; b < removed_count; ++b) {
      if (removed.index[b] >= count) continue;
      for (int64_t lane = 0; lane < vectors(panel) * W; ++lane) {
        const float weight = E::weight_b(w, weights_plane, S.panel, removed.index[b], lane);
        if (weight == 0.0f) continue;
        const T* const row = static_cast<const T*>(removed.address[b]);
        for (int64_t d = 0; d < p.head_dim_v; ++d)
          o_panel[d * S.panel + lane] += weight * to_float(row[d]);
      }
    }
  }

  TILEWISE_FN void step(int64_t panel, Range keys, bool partial) {
    const int64_t count = padded(keys);
    score_product(s_tile, false, k, q, panel, count);
    if (t.q.data != nullptr) score_product(x_tile, false, k, q_tangent, panel, count);
    if (t.k.data != nullptr) score_product(x_tile, t.q.data != nullptr, k_tangent, q, panel, count);
    weigh(panel, keys, partial);
    if (tangents.any()) value_product(panel, v, w_b, count, nonfinite_v, nonfinite_count);
    if (t.v.data != nullptr)
      value_product(panel, v_tangent, p_b, count, nonfinite_v_tangent, nonfinite_tangent_count);
  }

  TILEWISE_FN void run() {
    begin();
    const Tiling tiling{s.band.keys, S.strip};
    const TileWalk walk = lane_mask.walk(lanes, S.panel, tiling, lanes.all_lanes_any(S.panel));
    for (int64_t j = walk.first(); j < walk.end(); j = walk.after(j)) {
      const Range keys = tiling.at(j);
      load_tile(keys);
      for (int64_t i = 0; i < used_panels(); ++i) {
        const Coverage coverage = walk.of(j, i);
        if (!lanes.panel_sees(i, keys) || coverage == Coverage::none) continue;
        // On the diagonal a panel stops at the last key that it sees.
        step(i, {keys.begin, min(keys.end, lanes.any[i].end)}, coverage == Coverage::partial);
      }
    }
    for (int64_t lane = 0; lane < lanes.count; ++lane) add_sink(lane);
    for (int64_t first = 0; first < lanes.count; first += W) finish_lanes(first);
  }

  // The sink is a key without a value.
  TILEWISE_FN void add_sink(int64_t lane) {
    const int64_t head = lanes.head[lane];
    if (p.sinks == nullptr || p.sinks[head] == kMinusInfinity) return;
    const LogSum sum = log_sum_of(p, s, lanes.row[lane], head);
    const LogSum sink{p.sinks[head]};
    const float tangent = t.sinks != nullptr ? t.sinks[head] : 0.0f;
    mean[lane] += __builtin_expf(sink.above(sum)) * (tangent - reference[lane]);
  }

  TILEWISE_FN void finish_lanes(int64_t first) {
    const int64_t valid = min<int64_t>(W, lanes.count - first);
    with_out_type<T>(
        p, [&](auto type) { store_tangents<typename decltype(type)::type>(first, valid); });
    if (t.lse == nullptr) return;
    for (int64_t lane = first; lane < first + valid; ++lane)
      t.lse[lse_tangent_index(t, s, lanes.row[lane], lanes.head[lane])] =
          reference[lane] + mean[lane];
  }

  template <class Out>
  TILEWISE_FN void store_tangents(int64_t first, int64_t valid) {
    const float* const o_lanes = o + first / S.panel * dv.m * S.panel + first % S.panel;
    for (int64_t c = 0; c < p.head_dim_v; c += W) {
      const int64_t now = min<int64_t>(W, p.head_dim_v - c);
      F block[W];
      for (int i = 0; i < W; ++i) block[i] = i < now ? load(o_lanes + (c + i) * S.panel) : F{};
      transpose(block);
      for (int64_t i = 0; i < valid; ++i) {
        const Out* const out = row_of<const Out>(p.out, first + i) + c;
        Out* const to = row_of<Out>(t.out, first + i) + c;
        const F value = now == W ? to_fp32(out) : to_fp32_tail(out, now);
        const F tangent = block[i] - value * mean[first + i];
        if (now == W)
          from_fp32(to, tangent);
        else
          from_fp32_tail(to, tangent, now);
      }
    }
  }
  template <class Row>
  TILEWISE_FN Row* row_of(const tilewise_tensor& view, int64_t lane) const {
    return static_cast<Row*>(view.data) + s.row_offset(view, lanes.row[lane]) +
           lanes.head[lane] * view.stride_head;
  }
};

template <class E>
void jvp_item(const JvpTask& task, Arena scratch) {
  [[maybe_unused]] const typename E::Session session{};
  Jvp<E> jvp(task, scratch);
  jvp.run();
}

}  // namespace
}  // namespace tilewise::cpu
