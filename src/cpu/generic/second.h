// The gradients, with respect to q, k, v and so on, of a loss of the results and of their tangents:
// Pass::second of one work item.
//
// With dout, dlse the gradients of the results and dout', dlse' those of the tangents, s' the
// tangents of the scores (ScoreTangents) and D the factors of dropout:
//
//   g  = P (D dout'.v - (dout'.out - dlse'))                       gradient of s'
//   dS = P (D (dout.v + dout'.v') - delta) + (s' - lse') g         gradient of s
//        delta = dout.out + dout'.out' - dlse
//   dZ' = f' g,  dZ = f' dS + f'' z' g                             gradients of z' and z
//   dX = scale dZ + scale' dZ',  dX' = scale dZ'                   gradients of x and x'
//   dV += P^T dout + (P (s' - lse'))^T dout'
//   dK += dX^T Q + dX'^T Q'            dQ += dX K + dX' K'
//
// g and the first products of each line are those of a backward whose incoming gradients are those
// of the tangents. This struct is that backward with other weights and further products; products
// of absent tensors are left out.
#pragma once

#include "cpu/generic/backward.h"
#include "cpu/generic/score_tangents.h"

namespace tilewise::cpu {
namespace {

template <class E>
struct Second : Backward<E> {
  using Base = Backward<E>;
  using T = typename E::Storage;
  using Removed = typename Base::Removed;
  using Visible = typename Base::Visible;
  using Base::p, Base::s, Base::g, Base::task, Base::lanes, Base::rows, Base::scores, Base::weights,
      Base::dropout, Base::general, Base::want_dq;
  using Base::S, Base::kQ, Base::kScoreLd, Base::kWeightsLd;

  const Tangents& t;
  SecondScratch x;
  ScoreTangents tangents;
  double dscale = 0.0;
  int64_t nonfinite_k_count = 0;  // of the tangents
  int64_t nonfinite_q_count = 0;
  int64_t nonfinite_do_count = 0;  // of dout

  TILEWISE_FN Second(const BackwardTask& a_task, Arena& arena)
      : Base(a_task, arena),
        t(*a_task.tangents),
        x(S, g, t, *this, arena),
        tangents(x.bias_tangent, p, t, scores.score) {}

  TILEWISE_FN void load_keys() {
    Base::load_keys();
    const int64_t padded = Base::padded_keys();
    if (t.k.data != nullptr) {
      key_rows(rows, task.keys, padded, s.kv, t.k, task.kv_head);
      pack_columns<E>(x.k, Base::qk.ld, Base::k_plane, rows, padded, p.head_dim);
      nonfinite_k_count = remove_nonfinite_rows(rows, padded, p.head_dim, x.nonfinite_k);
      Base::pack_keys_by_rows(x.k_t);
    }
    if (t.v.data == nullptr) return;
    key_rows(rows, task.keys, padded, s.kv, t.v, task.kv_head);
    pack_columns<E>(x.v, Base::dve.ld, Base::v_plane, rows, padded, p.head_dim_v);
  }

  TILEWISE_FN void load_queries(int64_t tile) {
    Base::load_queries(tile);
    if (t.q.data != nullptr)
      nonfinite_q_count = Base::pack_queries(x.q_t, x.q_rows, t.q, x.nonfinite_q);
    if (g.dout.data != nullptr)
      nonfinite_do_count = Base::pack_douts(x.do_t, x.do_rows, g.dout, x.nonfinite_do);
    const Incoming results = Incoming::of(g);
    for (int64_t lane = 0; lane < round_up(lanes.count, S.panel); ++lane) {
      const int64_t at = min(lane, lanes.count - 1);
      const bool exists = lane < lanes.count;
      x.delta[lane] = exists ? task.second_delta[tile * task.tile_stride * kQ + lane] : 0.0f;
      x.dlse[lane] = results.dlse_at(s, lanes.row[at], lanes.head[at]);
      x.mean[lane] = t.lse[lse_tangent_index(t, s, lanes.row[at], lanes.head[at])];
    }
  }

  // Row constants of W lanes.
  struct OfLanes {
    F delta_tangent, dlse_tangent, delta, dlse, mean;
  };

  // The gradients of s' and s, and the weights with which dV sums dout and dout', in W lanes.
  struct Gradient {
    F of_tangent;
    F of_score;
    F dropped;          // P D
    F dropped_tangent;  // P D (s' - lse')
  };
  template <bool kPlain>
  TILEWISE_FN static Gradient gradient(const ScoreTangents::Element& e, F kept, F dp_tangent, F dp,
                                       const OfLanes& row, I single_key) {
    F centred = e.tangent - row.mean;
    F from_tangent = kept * dp_tangent - row.delta_tangent;
    F from_result = kept * dp - row.delta;
    // With a single key these differences are exactly 0 rather than rounding errors.
    if (!kPlain) {
      centred = single_key ? e.tangent - e.tangent : centred;
      from_tangent = single_key ? (dp_tangent - dp_tangent) + row.dlse_tangent : from_tangent;
      from_result = single_key ? (dp - dp) + row.dlse : from_result;
    }
    const F dropped = e.weight * kept;
    return {.of_tangent = e.weight * from_tangent,
            .of_score = e.weight * (from_result + centred * from_tangent),
            .dropped = dropped,
            .dropped_tangent = dropped * centred};
  }

  // Replaces the scores of W lanes by the weights of the six products.
  template <bool kPlain, bool kDropout>
  TILEWISE_FN void weigh_lanes(int64_t first, Range keys, Visible visible) {
    const Lanes::Bounds bounds = kPlain ? Lanes::Bounds{} : lanes.bounds(first, keys);
    const I diagonal = kPlain ? I{} : ScoreTile::diagonal(s, lanes, first, keys);
    const RowWeights::OfLanes weights_row = weights.template of_lanes<kPlain>(first);
    const OfLanes row = {load(Base::delta + first), load(Base::dlse + first), load(x.delta + first),
                         load(x.dlse + first), load(x.mean + first)};
    const bool has_products = tangents.of_products();
    const bool has_dp = g.dout.data != nullptr || t.v.data != nullptr;
    F scale_sum{};
    KeepMask keep;
    for (int32_t key = 0; key < kBackTileK; key += 2) {
      F dx[2];
      F dx_tangent[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (key + i) * kScoreLd + Base::score_lane(first);
        if (kDropout && (key + i) % Dropout::kKeysPerBlock == 0)
          keep = KeepMask::of(dropout, p, s, lanes, first, keys.begin + key + i);
        const F raw = load(Base::s_tile + at);
        const F raw_tangent = has_products ? load(x.x_tile + at) : F{};
        const ScoreTangents::Element e = tangents.template at<T, kPlain>(
            scores, weights, weights_row, raw, raw_tangent, diagonal, key + i, first);
        const F kept = kDropout ? keep.scale(dropout, key + i) : splat(1.0f);
        Gradient d =
            gradient<kPlain>(e, kept, load(Base::dp_tile + at), has_dp ? load(x.d_tile + at) : F{},
                             row, weights_row.single_key);
        F dz_tangent = d.of_tangent;
        F dz = d.of_score;
        if (!kPlain && general) {
          dz_tangent = e.derivative * d.of_tangent;
          dz = e.derivative * d.of_score + e.second * e.scaled * d.of_tangent;
        }
        F share = dz * raw + dz_tangent * raw_tangent;
        dx[i] = dz * tangents.scale + dz_tangent * tangents.scale_tangent;
        dx_tangent[i] = dz_tangent * tangents.scale;
        I sees = I{} - 1;
        if (!kPlain && visible.masked) {
          sees = bounds.sees(key + i);
          if (visible.partial) sees &= Base::lane_mask.sees(key + i, first);
          for (F* const each : {&d.dropped, &d.dropped_tangent, &share, &dx[i], &dx_tangent[i]})
            *each = sees ? *each : F{};
        }
        scale_sum += share;
        if (!kPlain && g.dbias != nullptr) Base::add_dbias(first, keys, key + i, d.of_score, sees);
        store_a(x.p_a, key + i, first, d.dropped);
        store_a(Base::p_a, key + i, first, d.dropped_tangent);
        store_a(Base::ds_a, key + i, first, dx[i]);
        store_a(x.ds_a, key + i, first, dx_tangent[i]);
      }
      if (!want_dq || S.pair == 1) continue;
      E::store_weights_b(Base::ds_b, Base::weights_plane, kQ, key, first, dx[0], dx[1]);
      E::store_weights_b(x.ds_b, Base::weights_plane, kQ, key, first, dx_tangent[0], dx_tangent[1]);
    }
    dscale += static_cast<double>(sum_lanes(scale_sum));
  }
  TILEWISE_FN void store_a(uint32_t* to, int64_t key, int64_t lane, F w) const {
    E::store_weights_a(to, Base::weights_plane, kWeightsLd, key, lane, w);
  }

  // Processes one key tile for the panels `used` of the query tile.
  TILEWISE_FN void step(int64_t key_tile, Range keys, Range used) {
    const int64_t first_key = key_tile * kBackTileK;
    const bool has_q = t.q.data != nullptr;
    const bool has_dout = g.dout.data != nullptr;
    for (int64_t i = used.begin; i < used.end; ++i) {
      const int64_t lane = i * S.panel;
      Base::score_product(Base::s_tile, false, Base::k, Base::q_t, i, first_key);
      if (has_q) Base::score_product(x.x_tile, false, Base::k, x.q_t, i, first_key);
      if (t.k.data != nullptr) Base::score_product(x.x_tile, has_q, x.k, Base::q_t, i, first_key);
      Base::value_score_product(Base::dp_tile, false, Base::v, Base::do_t, i, first_key);
      if (has_dout) Base::value_score_product(x.d_tile, false, Base::v, x.do_t, i, first_key);
      if (t.v.data != nullptr)
        Base::value_score_product(x.d_tile, has_dout, x.v, Base::do_t, i, first_key);
      if (general) scores.load_panel(s, lanes, lane, S.panel, keys, lane);
      tangents.load_panel(s, lanes, lane, S.panel, keys, lane);
      const Visible visible = Base::see_panel(i, keys);
      for (int64_t at = lane; at < lane + S.panel; at += W) {
        if (dropout.on())
          weigh_lanes<false, true>(at, keys, visible);
        else if (general || visible.masked || !weights.all_plain)
          weigh_lanes<false, false>(at, keys, visible);
        else
          weigh_lanes<true, false>(at, keys, visible);
      }
    }
    Base::products(key_tile, used);
    if (has_dout)
      Base::add_dv(key_tile, used, x.p_a, x.do_rows, Removed{x.nonfinite_do, nonfinite_do_count});
    if (has_q)
      Base::add_dk(key_tile, used, x.ds_a, x.q_rows, Removed{x.nonfinite_q, nonfinite_q_count});
    if (want_dq && t.k.data != nullptr)
      Base::sum_over_keys(key_tile, used, x.ds_b, x.ds_a, x.k_t,
                          Removed{x.nonfinite_k, nonfinite_k_count});
  }

  TILEWISE_FN void finish() {
    Base::write_keys(1.0f);  // the weights contain the scale
    if (task.dscale != nullptr) *task.dscale = dscale;
  }
};

template <class E>
void second_item(const BackwardTask& task, Arena scratch) {
  [[maybe_unused]] const typename E::Session session{};
  Second<E> second(task, scratch);
  Backward<E>::run(second);
}

}  // namespace
}  // namespace tilewise::cpu
