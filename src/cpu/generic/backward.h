// The backward of one work item (FlashAttention-2, arXiv 2307.08691, algorithm 2).
//
// Work item  A chunk of keys of one key/value head, and every query tile that sees the chunk.
// Loops      Query tiles, then key tiles of kBackTileK keys, then panels: the S.panel lanes whose
//            products one call of the matrix engine computes.
// Layout     Query rows are the vector lanes, as in the forward, so S and dP are transposed.
//
//   S^T  = K Q^T        P^T  = exp(scale S^T - lse)
//   dP^T = V dO^T       dS^T = P^T (dP^T - delta)
//   dV  += P^T dO       dK  += dS^T Q       dQ^T += K^T dS^T
//
// K and V of the chunk are packed once; dK and dV accumulate in scratch memory. Both belong to this
// work item alone. S^T, dP^T and the weights of a step stay in the L1 cache. dQ of a query tile is
// added to a sum in the workspace, under a semaphore per query tile that makes the chunks add in
// ascending order: the result does not depend on which thread computes which chunk.
#pragma once

#include <sched.h>

#include "cpu/generic/engine.h"
#include "cpu/generic/lane_mask.h"
#include "cpu/generic/row_weights.h"

namespace tilewise::cpu {
namespace {

template <class E>
struct Backward : BackwardScratch {
  using T = typename E::Storage;
  static constexpr Shape S = E::S;
  static constexpr int64_t kQ = S.back_q;
  static constexpr int64_t kPanels = kQ / S.panel;
  static constexpr int64_t kTileUnits = kBackTileK / S.pair;
  static constexpr int64_t kWeightsLd = kQ / S.pair;
  // Only one panel of S^T and dP^T is stored (8 KB each, which stay in the L1 cache), unless they
  // double as the fp32 weights of all panels.
  static constexpr int64_t kScoreLd = S.pair == 1 ? kQ : S.panel;

  const BackwardTask& task;
  const Problem& p;
  const Gradients& g;
  const Sequence& s;
  Lanes lanes;
  ScoreTile scores;
  RowWeights weights;
  const Dropout dropout;
  const bool general;
  const bool want_dq;
  LaneMask lane_mask;
  LaneMask row_mask;  // the mask of the rows of the query tile, over all keys
  const T** rows;
  int64_t nonfinite_k_count = 0;
  int64_t nonfinite_q_count = 0;
  int64_t nonfinite_do_count = 0;

  TILEWISE_FN Backward(const BackwardTask& t, Arena& arena)
      : BackwardScratch(S, *t.problem, arena),
        task(t),
        p(*t.problem),
        g(*t.gradients),
        s(t.sequence),
        lanes{BackwardScratch::lanes},
        scores{BackwardScratch::scores, &p, score_of(p)},
        weights(BackwardScratch::weights, p, scores.score),
        dropout(dropout_of(p)),
        general(weights.general),
        want_dq(t.dq_sum != nullptr),
        lane_mask{BackwardScratch::mask},
        row_mask{BackwardScratch::mask_of_rows},
        rows(reinterpret_cast<const T**>(BackwardScratch::rows)) {}

  TILEWISE_FN int64_t padded_keys() const { return round_up(task.keys.size(), kBackTileK); }

  TILEWISE_FN void load_keys() {
    const int64_t padded = padded_keys();
    key_rows(rows, task.keys, padded, s.kv, p.k, task.kv_head);
    pack_columns<E>(k, qk.ld, k_plane, rows, padded, p.head_dim);
    nonfinite_k_count = remove_nonfinite_rows(rows, padded, p.head_dim, nonfinite_k);
    pack_keys_by_rows(k_t);
    key_rows(rows, task.keys, padded, s.kv, p.v, task.kv_head);
    pack_columns<E>(v, dve.ld, v_plane, rows, padded, p.head_dim_v);
    for (int64_t i = 0; i < padded * qk.n_ld; ++i) dk[i] = 0.0f;
    for (int64_t i = 0; i < padded * dve.n_ld; ++i) dv[i] = 0.0f;
  }

  // Packs the keys whose addresses are in `rows`, tile by tile, for a contraction over keys.
  TILEWISE_FN void pack_keys_by_rows(uint32_t* to) {
    for (int64_t i = 0; i < padded_keys() / kBackTileK; ++i)
      E::pack_rows_a(to + i * S.parts * k_t_plane, qk.m_ld, k_t_plane, rows + i * kBackTileK,
                     kBackTileK, p.head_dim);
  }

  // Packs query rows, or rows of dout, twice: for a contraction over columns and for one over rows.
  // Returns how many rows with Inf or NaN were removed from the latter.
  TILEWISE_FN int64_t pack_queries(uint32_t* columns, uint32_t* by_rows,
                                   const tilewise_tensor& view, const RowScratch& removed) {
    const int64_t used = round_up(lanes.count, S.panel);
    lane_rows(rows, lanes, used, s, view);
    for (int64_t i = 0; i < used / S.panel; ++i)
      pack_columns_transposed<E>(columns + i * qk.units * S.panel, S.panel, q_t_plane,
                                 rows + i * S.panel, S.panel, p.head_dim, qk.units);
    const int64_t count = remove_nonfinite_rows(rows, used, p.head_dim, removed);
    pack_rows<E>(by_rows, qk.n_ld, q_rows_plane, rows, used, p.head_dim);
    return count;
  }
  TILEWISE_FN int64_t pack_douts(uint32_t* columns, uint32_t* by_rows, const tilewise_tensor& view,
                                 const RowScratch& removed) {
    const int64_t used = round_up(lanes.count, S.panel);
    lane_rows(rows, lanes, used, s, view);
    for (int64_t i = 0; i < used / S.panel; ++i)
      pack_columns_transposed<E>(columns + i * dve.units * S.panel, S.panel, do_t_plane,
                                 rows + i * S.panel, S.panel, p.head_dim_v, dve.units);
    const int64_t count = remove_nonfinite_rows(rows, used, p.head_dim_v, removed);
    pack_rows<E>(by_rows, dve.n_ld, do_rows_plane, rows, used, p.head_dim_v);
    return count;
  }

  TILEWISE_FN void load_queries(int64_t tile) {
    const Packing packing{group_size(p)};
    const Tiling tiling{packing.packed(s.band.rows), kQ};
    lanes.fill(p, s, task.kv_head, tiling.at(tile), S.panel);
    const int64_t used = round_up(lanes.count, S.panel);
    const Range rows_of_tile = {lanes.row[0], lanes.row[lanes.count - 1] + 1};
    if (p.lse_low != nullptr)  // sees_one_key asks only then
      row_mask.begin(p, s, task.kv_head, rows_of_tile, {0, s.band.keys});
    nonfinite_q_count = pack_queries(q_t, q_rows, p.q, nonfinite_q);
    nonfinite_do_count = pack_douts(do_t, do_rows, task.incoming.dout, nonfinite_do);
    for (int64_t lane = 0; lane < used; ++lane) {
      const int64_t at = min(lane, lanes.count - 1);
      const int64_t row = lanes.row[at];
      const int64_t head = lanes.head[at];
      weights.load_row(s, lane, row, head);
      const Range seen = {lanes.begin[lane], lanes.end[lane]};
      weights.single_key[lane] = sees_one_key(seen, row, head) ? -1 : 0;
      dlse[lane] = task.incoming.dlse_at(s, row, head);
      delta[lane] = lane < lanes.count ? task.delta[tile * task.tile_stride * kQ + lane] : 0.0f;
    }
    for (int64_t i = 0; i < used / S.panel * qk.m * S.panel; ++i) dq[i] = 0.0f;
  }

  // Whether the weight of the row's only key is exactly 1: the row sees one key and has no sink.
  // Keys whose bias is -inf do not count; for most rows the search ends after two keys. Without
  // lse_low the caller's lse may be that of more keys than these, as in ring attention.
  TILEWISE_FN bool sees_one_key(Range seen, int64_t row, int64_t head) const {
    if (p.lse_low == nullptr || seen.empty() ||
        (p.sinks != nullptr && p.sinks[head] != kMinusInfinity))
      return false;
    if (row_mask.on()) return mask_shows_one_key(seen, row, head);
    if (p.bias == nullptr || seen.size() == 1) return seen.size() == 1;
    const int64_t offset = bias_offset(p, s.batch, head, row);
    int count = 0;
    for (int64_t key = seen.begin; key < seen.end && count < 2; ++key)
      if (bias_at(p, offset + key) != kMinusInfinity) ++count;
    return count == 1;
  }

  TILEWISE_FN bool mask_shows_one_key(Range seen, int64_t row, int64_t head) const {
    int64_t only = -1;
    bool more = false;
    row_mask.mask.for_runs(head, row, seen, [&](Range run) {
      for (int64_t key = run.begin; key < run.end && !more; ++key) {
        if (p.bias != nullptr &&
            bias_at(p, bias_offset(p, s.batch, head, row) + key) == kMinusInfinity)
          continue;
        more = only >= 0 && key != only;  // runs may overlap
        only = key;
      }
      return !more;
    });
    return only >= 0 && !more;
  }

  TILEWISE_FN static constexpr int64_t score_lane(int64_t lane) {
    return S.pair == 1 ? lane : lane % S.panel;
  }

  // How much of a key tile W lanes see.
  struct Visible {
    bool masked;   // not all of it
    bool partial;  // not all of it, because of the mask
  };

  // Computes P^T and dS^T of W lanes from S^T and dP^T. kPlain: no option is on and every lane sees
  // all keys.
  template <bool kPlain, bool kDropout = false>
  TILEWISE_FN void softmax_lanes(int64_t first, Range keys, Visible visible) {
    const Lanes::Bounds bounds = kPlain ? Lanes::Bounds{} : lanes.bounds(first, keys);
    const I diagonal = kPlain ? I{} : ScoreTile::diagonal(s, lanes, first, keys);
    const RowWeights::OfLanes row = weights.of_lanes<kPlain>(first);
    const F delta_lanes = load(delta + first);
    const F dlse_lanes = kPlain ? F{} : load(dlse + first);
    const bool changed = !kPlain && general;
    KeepMask keep;
    for (int32_t key = 0; key < kBackTileK; key += 2) {
      F ds[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (key + i) * kScoreLd + score_lane(first);
        if (kDropout && (key + i) % Dropout::kKeysPerBlock == 0)
          keep = KeepMask::of(dropout, p, s, lanes, first, keys.begin + key + i);
        Score::Capped<F> score{load(s_tile + at), splat(1.0f)};
        if (changed) score = scores.at(score.value, diagonal, key + i, first);
        const F w = weights.weight<T, kPlain>(row, score.value);
        F dp = load(dp_tile + at);
        F dropped = w;
        if constexpr (kDropout) {
          const F kept = keep.scale(dropout, key + i);
          dropped = w * kept;
          dp = dp * kept;
        }
        F from_sum = dp - delta_lanes;
        // With a single key dp equals do.o, so their difference is exactly 0 rather than a rounding
        // error, unless dp is NaN or infinite.
        if (!kPlain) from_sum = row.single_key ? (dp - dp) + dlse_lanes : from_sum;
        const F dscore = w * from_sum;
        ds[i] = changed ? dscore * score.derivative : dscore;
        I sees = I{} - 1;
        if (!kPlain && visible.masked) {
          sees = bounds.sees(key + i);
          if (visible.partial) sees &= lane_mask.sees(key + i, first);
          dropped = sees ? dropped : F{};
          ds[i] = sees ? ds[i] : F{};
        }
        E::store_weights_a(p_a, weights_plane, kWeightsLd, key + i, first, dropped);
        if (!kPlain && g.dbias != nullptr) add_dbias(first, keys, key + i, dscore, sees);
        E::store_weights_a(ds_a, weights_plane, kWeightsLd, key + i, first, ds[i]);
      }
      if (want_dq && S.pair > 1)
        E::store_weights_b(ds_b, weights_plane, kQ, key, first, ds[0], ds[1]);
    }
  }

  TILEWISE_FN void add_dbias(int64_t first, Range keys, int32_t key, F dscore, I sees) {
    for (int i = 0; i < W; ++i) {
      if (first + i >= lanes.count || sees[i] == 0) continue;
      const int64_t lane = first + i;
      g.dbias[s.batch * g.dbias_stride_batch + lanes.head[lane] * g.dbias_stride_head +
              lanes.row[lane] * g.dbias_stride_row + keys.begin + key] += dscore[i];
    }
  }

  // Computes one panel of a score tile, keys . queries, for the keys from `first_key` of the chunk
  // on. If `adds`, the products are added to the tile.
  TILEWISE_FN void score_product(float* tile, bool adds, const uint32_t* keys,
                                 const uint32_t* queries, int64_t panel, int64_t first_key) {
    E::gemm(tile + score_lane(panel * S.panel), kScoreLd, adds,
            {keys + first_key * qk.ld, qk.ld, 1, k_plane}, kBackTileK,
            {queries + panel * qk.units * S.panel, S.panel, q_t_plane}, S.panel / W, qk.units);
  }
  TILEWISE_FN void value_score_product(float* tile, bool adds, const uint32_t* values,
                                       const uint32_t* douts, int64_t panel, int64_t first_key) {
    E::gemm(tile + score_lane(panel * S.panel), kScoreLd, adds,
            {values + first_key * dve.ld, dve.ld, 1, v_plane}, kBackTileK,
            {douts + panel * dve.units * S.panel, S.panel, do_t_plane}, S.panel / W, dve.units);
  }

  // How much of a key tile a panel sees; this reads the bits of a partial one.
  TILEWISE_FN Visible see_panel(int64_t panel, Range keys) {
    const int64_t lane = panel * S.panel;
    const bool partial = lane_mask.of_panel(lanes, panel, S.panel, keys) != Coverage::full;
    if (partial) lane_mask.load(lanes, lane, S.panel, keys, lane);
    return {partial || keys.size() != kBackTileK || !lanes.panel_covers(panel, keys), partial};
  }

  // Processes one key tile for the panels `used` of the query tile.
  TILEWISE_FN void step(int64_t key_tile, Range keys, Range used) {
    const int64_t first_key = key_tile * kBackTileK;
    for (int64_t i = used.begin; i < used.end; ++i) {
      const int64_t lane = i * S.panel;
      score_product(s_tile, false, k, q_t, i, first_key);
      value_score_product(dp_tile, false, v, do_t, i, first_key);
      if (general) scores.load_panel(s, lanes, lane, S.panel, keys, lane);
      const Visible visible = see_panel(i, keys);
      for (int64_t at = lane; at < lane + S.panel; at += W) {
        if (dropout.on())
          softmax_lanes<false, true>(at, keys, visible);
        else if (general || visible.masked || !weights.all_plain)
          softmax_lanes<false>(at, keys, visible);
        else
          softmax_lanes<true>(at, keys, visible);
      }
    }
    products(key_tile, used);
  }

  // Rows with Inf or NaN that were removed from an operand.
  struct Removed {
    const RowScratch& rows;
    int64_t count;
  };

  // Sums over the lanes `used`: sum[key] += weight[key][lane] rows[lane]. Rows that were removed
  // are added where their weight is not 0.
  TILEWISE_FN void sum_over_lanes(float* sums, int64_t ld, const uint32_t* w, const uint32_t* from,
                                  int64_t plane, int64_t columns, Range used,
                                  const Removed& removed) {
    const int64_t first_unit = used.begin * S.panel / S.pair;
    E::gemm(sums, ld, true, {w + first_unit, kWeightsLd, 1, weights_plane}, kBackTileK,
            {from + first_unit * ld, ld, plane}, ceil_div(columns, W),
            used.size() * S.panel / S.pair);
    for (int64_t b = 0; b < removed.count; ++b) {
      const int64_t lane = removed.rows.index[b];
      if (lane < used.begin * S.panel || lane >= used.end * S.panel) continue;
      for (int64_t key = 0; key < kBackTileK; ++key)
        add_scaled(sums + key * ld, E::weight_a(w, weights_plane, kWeightsLd, key, lane),
                   static_cast<const T*>(removed.rows.address[b]), columns, 1);
    }
  }
  TILEWISE_FN void add_dv(int64_t key_tile, Range used, const uint32_t* w, const uint32_t* from,
                          const Removed& removed) {
    sum_over_lanes(dv + key_tile * kBackTileK * dve.n_ld, dve.n_ld, w, from, do_rows_plane,
                   p.head_dim_v, used, removed);
  }
  TILEWISE_FN void add_dk(int64_t key_tile, Range used, const uint32_t* w, const uint32_t* from,
                          const Removed& removed) {
    sum_over_lanes(dk + key_tile * kBackTileK * qk.n_ld, qk.n_ld, w, from, q_rows_plane, p.head_dim,
                   used, removed);
  }

  // The weights are in both layouts: w_b for the product, w_a for removed keys.
  TILEWISE_FN void sum_over_keys(int64_t key_tile, Range used, const uint32_t* w_b,
                                 const uint32_t* w_a, const uint32_t* keys,
                                 const Removed& removed) {
    const uint32_t* const tile = keys + key_tile * S.parts * k_t_plane;
    for (int64_t i = used.begin; i < used.end; ++i)
      E::gemm(dq + i * qk.m * S.panel, S.panel, true,
              E::rows_a(tile, qk.m_ld, kBackTileK, k_t_plane), qk.m,
              {w_b + i * S.panel, kQ, weights_plane}, S.panel / W, kTileUnits);
    for (int64_t b = 0; b < removed.count; ++b) {
      const int64_t key = removed.rows.index[b] - key_tile * kBackTileK;
      if (key < 0 || key >= kBackTileK) continue;
      for (int64_t lane = used.begin * S.panel; lane < used.end * S.panel; ++lane)
        add_scaled(dq + lane / S.panel * qk.m * S.panel + lane % S.panel,
                   E::weight_a(w_a, weights_plane, kWeightsLd, key, lane),
                   static_cast<const T*>(removed.rows.address[b]), p.head_dim, S.panel);
    }
  }

  TILEWISE_FN void products(int64_t key_tile, Range used) {
    add_dv(key_tile, used, p_a, do_rows, {nonfinite_do, nonfinite_do_count});
    add_dk(key_tile, used, ds_a, q_rows, {nonfinite_q, nonfinite_q_count});
    if (want_dq) sum_over_keys(key_tile, used, ds_b, ds_a, k_t, {nonfinite_k, nonfinite_k_count});
  }

  TILEWISE_FN static void add_scaled(float* sum, float weight, const T* row, int64_t columns,
                                     int64_t stride) {
    if (weight == 0.0f) return;
    for (int64_t i = 0; i < columns; ++i) sum[i * stride] += weight * to_float(row[i]);
  }

  // With a mask: the chunks that add to dq of a query tile.
  TILEWISE_FN ChunkSet chunks_of(int64_t tile) const {
    return {task.chunks + tile * task.tile_stride * task.chunk_words};
  }

  // The number of chunks before this one that add to dq of a query tile.
  TILEWISE_FN int32_t chunks_before(int64_t tile) const {
    if (task.chunks != nullptr) return chunks_of(tile).count_below(task.chunk);
    const Packing packing{group_size(p)};
    const Range rows_of_tile = packing.rows(Tiling{packing.packed(s.band.rows), kQ}.at(tile));
    const Range chunks = Tiling{s.band.keys, chunk}.touching(s.band.keys_of_any(rows_of_tile));
    return static_cast<int32_t>(task.chunk - chunks.begin);
  }

  // dq_sum[tile] += dq once the semaphore reaches this chunk. Work items are taken in ascending
  // order, so the chunk before this one is running or done, and the wait ends.
  TILEWISE_FN void add_dq(int64_t tile) {
    const int32_t before = chunks_before(tile);
    int32_t* const semaphore = task.dq_semaphores + tile * task.tile_stride;
    for (int spins = 0; __atomic_load_n(semaphore, __ATOMIC_ACQUIRE) != before; ++spins)
      if (spins > 64) sched_yield();
    float* const sum = task.dq_sum + tile * task.tile_stride * kPanels * qk.m * S.panel;
    const int64_t size = round_up(lanes.count, S.panel) / S.panel * qk.m * S.panel;
    if (before == 0)
      for (int64_t i = 0; i < size; ++i) sum[i] = dq[i];
    else
      for (int64_t i = 0; i < size; ++i) sum[i] += dq[i];
    __atomic_store_n(semaphore, before + 1, __ATOMIC_RELEASE);
  }

  TILEWISE_FN bool panel_sees(int64_t index, Range keys) const {
    return lanes.panel_sees(index, keys) &&
           lane_mask.of_panel(lanes, index, S.panel, keys) != Coverage::none;
  }

  // Self: this struct, or the one of Pass::second, which is derived from it and hides some members.
  template <class Self>
  TILEWISE_FN static void run(Self& self) {
    const Problem& p = self.p;
    const Lanes& lanes = self.lanes;
    self.load_keys();
    const Packing packing{group_size(p)};
    const Range chunk_keys = self.task.keys;
    const Range seeing = self.s.band.rows_of_any(chunk_keys);
    const Tiling tiling{packing.packed(self.s.band.rows), kQ};
    const Range tiles = tiling.touching(
        {packing.packed(seeing.begin), packing.packed(max(seeing.begin, seeing.end))});
    const Tiling key_tiling{chunk_keys.size(), kBackTileK};
    self.lane_mask.begin(p, self.s, self.task.kv_head, {0, self.s.band.rows}, chunk_keys);
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      if (self.lane_mask.on() && !self.chunks_of(tile).contains(self.task.chunk)) continue;
      self.load_queries(tile);
      const int64_t used_panels = ceil_div(lanes.count, S.panel);
      for (int64_t j = 0; j < key_tiling.count(); ++j) {
        const Range local = key_tiling.at(j);
        const Range keys = {chunk_keys.begin + local.begin, chunk_keys.begin + local.end};
        // Bounds do not decrease with the row, so the panels that see a key tile are contiguous. A
        // mask may hide it from panels in between, whose weights are then 0.
        Range active{0, used_panels};
        while (active.begin < active.end && !self.panel_sees(active.begin, keys)) ++active.begin;
        while (active.begin < active.end && !self.panel_sees(active.end - 1, keys)) --active.end;
        if (!active.empty()) self.step(j, keys, active);
      }
      if (self.want_dq) self.add_dq(tile);
    }
    self.finish();
  }

  TILEWISE_FN void finish() { write_keys(scores.score.scale); }

  // dk is `factor` times its sum.
  TILEWISE_FN void write_keys(float factor) {
    const KvSource source = gradient_source(p, s);
    if (g.dk.data != nullptr) write_rows(source, g.dk, dk, qk.n_ld, p.head_dim, factor);
    if (g.dv.data != nullptr) write_rows(source, g.dv, dv, dve.n_ld, p.head_dim_v, 1.0f);
  }

  TILEWISE_FN void write_rows(const KvSource& source, const tilewise_tensor& view,
                              const float* sums, int64_t ld, int64_t columns, float scale) {
    for (int64_t key = 0; key < task.keys.size(); ++key) {
      T* const out = static_cast<T*>(view.data) + source.offset(view, task.keys.begin + key) +
                     task.kv_head * view.stride_head;
      for (int64_t i = 0; i < columns; i += W) {
        const F value = load(sums + key * ld + i) * scale;
        if (i + W <= columns)
          from_fp32(out + i, value);
        else
          from_fp32_tail(out + i, value, columns - i);
      }
    }
  }
};

template <class E>
void backward_item(const BackwardTask& task, Arena scratch) {
  [[maybe_unused]] const typename E::Session session{};
  Backward<E> backward(task, scratch);
  Backward<E>::run(backward);
}

}  // namespace
}  // namespace tilewise::cpu
