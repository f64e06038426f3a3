// Gradients of a loss of the results and of their tangents (Pass::second): the backward with other
// weights and further products. As there, one CTA sums all terms of a gradient, in a fixed order,
// and so the results are deterministic.
//
// With dout, dlse the gradients of the results, dout', dlse' those of their tangents, f', f'' the
// derivatives of the softcap, and D the factors of dropout:
//
//   X = Q K^T           X' = Q' K^T + Q K'^T                Z' = scale X' + scale' X
//   P = e^(S - lse)     Y  = f' Z' + bias' - lse'           the centred tangents of the scores
//   E = D dO' V^T - delta'                                  delta' = dout'.out - dlse'
//   F = D (dO V^T + dO' V'^T) - delta                       delta = dout.out + dout'.out' - dlse
//   dZ' = P f' E        dZ = P f' F + P (f' Y + f'' Z') E   dbias = P F + P Y E
//   keys:  dV = (D P)^T dO + (D P Y)^T dO'
//          dK = (scale dZ + scale' dZ')^T Q + scale dZ'^T Q'
//   rows:  dQ = (scale dZ + scale' dZ') K + scale dZ' K'
//          dscale = Q . (dZ K + dZ' K') + Q' . dZ' K
//
// second_prepare  grid heads_q * padded row tiles; reads out, out', dout, dout', dlse and dlse';
//                 writes row_delta (delta') and row_second_delta (delta)
// second_keys     grid the key tiles of params.order; writes dk and dv
// second_rows     grid heads_q * padded row tiles; writes dq and dscale_partials
// second_dbias    grid dbias_blocks(p, g); writes dbias
//
// With key_flags or row_flags the kernels of keys and rows compute only the tiles that another
// kernel family has flagged, with the row_delta and row_second_delta of that family; the grid may
// then have any size.
//
// A thread has one accumulator, so each sum computes its weights anew. Products of absent tensors
// are left out. The weights go through shared memory one element at a time: there is one copy of
// the code for every option, and it is short beside the products.
#pragma once

#include "cuda/common/dbias_tile.h"
#include "cuda/simt/backward.cuh"
#include "cuda/simt/score_tangents.h"

namespace tilewise::cuda::simt {

struct SecondShared : SharedTangents {
  alignas(16) float tangent_weights[kTile * kRowStride];
  // Rows: offsets in dout (Shared::out has those in dout'), lse' and delta (Shared::delta has
  // delta').
  int64_t result_dout[kTile];
  float lse_tangent[kTile];
  float second_delta[kTile];
};

template <class Config>
inline constexpr int32_t kSecondSharedBytes = sizeof(SecondShared);
static_assert(sizeof(SecondShared) <= 64 * 1024, "sm_75 has no more");

TILEWISE_DEVICE SecondShared& second_shared() { return static_cast<SecondShared&>(shared()); }

template <class C, bool kOwnsKeys>
struct Second : Backward<C, kOwnsKeys> {
  using Base = Backward<C, kOwnsKeys>;
  using T = typename C::Storage;
  using Weights = typename Base::Weights;
  using Base::p, Base::g, Base::thread, Base::sums;

  const SecondParams& params;
  const Tangents& t;
  const ScoreTangents<T, !kOwnsKeys> scores;

  TILEWISE_DEVICE explicit Second(const SecondParams& all)
      : Base(all), params(all), t(all.tangents), scores{p, t, thread} {}

  // In the products with v, dout is to dout' what a tangent is to its value.
  TILEWISE_DEVICE Operand<T> dout() const {
    return {Base::rows_of(t.dout, shared().out, p.head_dim_v),
            Base::rows_of(g.dout, second_shared().result_dout, p.head_dim_v)};
  }

  TILEWISE_DEVICE float scale() const { return shared().score_mod.score.scale; }
  TILEWISE_DEVICE float scale_tangent() const { return t.scale != nullptr ? *t.scale : 0.0f; }

  // Fills in the tables of a tile of rows. The caller provides the barriers before and after.
  TILEWISE_DEVICE void load_rows_of(const RowTile& tile) const {
    SecondShared& to = second_shared();
    const Sequence& s = to.sequence;
    load_row_table(p, tile, t.dout, {0, s.band.keys});
    load_lse(p);
    scores.load_row_table();
    const int r = ptx::thread_index();
    if (r >= kTile) return;
    to.result_dout[r] = kUnused;
    if (to.q[r] == kUnused) return;
    const int64_t row = to.row[r];
    const int64_t head = to.head[r];
    to.result_dout[r] = s.row_offset(g.dout, row) + head * g.dout.stride_head;
    to.lse_tangent[r] = t.lse[s.lse_offset(t.lse_stride_batch, row) + head * t.lse_stride_head];
    const int64_t at = delta_index(params, row, head);
    to.delta[r] = params.row_delta[at];
    to.second_delta[r] = params.row_second_delta[at];
  }

  // Fills in the tables of kTile keys; barriers as above.
  TILEWISE_DEVICE void load_keys(int64_t first) const {
    load_key_table(p, first);
    scores.load_key_table(first);
  }

  TILEWISE_DEVICE Weights weights() const { return Weights::of(thread); }
  TILEWISE_DEVICE Weights tangent_weights() const {
    return Weights::of(thread, second_shared().tangent_weights);
  }

  struct Factors {
    float of_result;
    float of_tangent;
  };

  // of_result, P f', is the factor of F in dZ and of E in dZ'; of_tangent, P (f' Y + f'' Z'), that
  // of E in dZ. Without `derivatives`, those of the softcap, they are P and P Y. `raw` and
  // `raw_tangent` are elements of X and X'.
  TILEWISE_DEVICE Factors factors_of(float raw, float raw_tangent, int r, int64_t key,
                                     bool derivatives) const {
    const ScoreMod& mod = shared().score_mod;
    const Score::Capped<float> score = mod.at(raw, shared().row_score_mod[r], key);
    const float weight = weight_of(score.value, r);
    const float scaled = raw_tangent * scale() + raw * scale_tangent();
    float tangent = score.derivative * scaled;
    if (t.bias != nullptr)
      tangent += bias_value(t.bias, p.bias_dtype, shared_tangents().bias_tangent[r] + key);
    const float centred = tangent - second_shared().lse_tangent[r];
    if (!derivatives) return {weight, weight * centred};
    return {weight * score.derivative,
            weight * (score.derivative * centred + score.second * scaled)};
  }

  // Stores the factors in `weights` and `tangent_weights`; 0 where masked.
  TILEWISE_DEVICE void store_factors(int64_t first_key, bool derivatives) const {
    Block raw;
    Block raw_tangent;
    scores.products(raw, raw_tangent);
    weights().store(raw);
    tangent_weights().store(raw_tangent);
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll 1
    for (int element = 0; element < 16; ++element) {
      const int r = thread.y * 4 + element / 4;
      const int64_t key = first_key + thread.x * 4 + element % 4;
      float& of_result = weights().at(element / 4, element % 4);
      float& of_tangent = tangent_weights().at(element / 4, element % 4);
      Factors factors{};
      if (visible.sees(element)) factors = factors_of(of_result, of_tangent, r, key, derivatives);
      of_result = factors.of_result;
      of_tangent = factors.of_tangent;
    }
  }

  // Calls combine(i, j, F, E) for the elements (i, j) of this thread's block whose key the row
  // sees.
  template <class Combine>
  TILEWISE_DEVICE void combine_products(int64_t first_key, const Combine& combine) const {
    Block e;
    Block f;
    products_with_tangent(e, f, dout(), scores.v());
    Base::apply_dropout(e, first_key);
    Base::apply_dropout(f, first_key);
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float delta = shared().delta[thread.y * 4 + i];
      const float second_delta = second_shared().second_delta[thread.y * 4 + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (visible.sees(i, j)) combine(i, j, f[i][j] - second_delta, e[i][j] - delta);
      }
    }
  }

  // Stores of_score dZ + of_tangent dZ' in `weights` and of_score dZ' in `tangent_weights`.
  TILEWISE_DEVICE void store_gradients(int64_t first_key, float of_score, float of_tangent) const {
    store_factors(first_key, true);
    combine_products(first_key, [&](int i, int j, float f, float e) {
      float& weight = weights().at(i, j);
      float& tangent_weight = tangent_weights().at(i, j);
      const float dz_tangent = weight * e;
      const float dz = weight * f + tangent_weight * e;
      weight = of_score * dz + of_tangent * dz_tangent;
      tangent_weight = of_score * dz_tangent;
    });
  }

  // Adds weights^T one + tangent_weights^T other to the sums.
  TILEWISE_DEVICE void add(const Rows<T>& one, const Rows<T>& other, bool masked) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const Rows<T> rows = i == 0 ? one : other;
      const float* const weights = i == 0 ? shared().weights : second_shared().tangent_weights;
      if (rows.data != nullptr) add_weighted(sums, weights, shared().stage, rows, masked);
    }
  }

  // --- second_keys ---

  // Sums dV or dK over the rows that see the keys.
  TILEWISE_DEVICE void walk_rows(bool for_dv) {
    Base::clear_sums();
    ptx::sync_block();
    Base::begin_row_walk();
    ptx::sync_block();
    for (int64_t at = Base::next_row_tile(0); at < shared().mask.tiles.end;
         at = Base::next_row_tile(at + 1)) {
      ptx::sync_block();
      load_rows_of(Base::row_tile(at));
      ptx::sync_block();
      const int64_t first_key = shared().current_keys.begin;
      load_keys(first_key);
      load_mask_bits(at, first_key);
      ptx::sync_block();
      if (for_dv) {
        store_factors(first_key, false);
        if (shared().score_mod.dropout.on()) {
          weights().apply_dropout(thread, first_key);
          tangent_weights().apply_dropout(thread, first_key);
        }
      } else {
        store_gradients(first_key, scale(), scale_tangent());
      }
      // dV += (D P)^T dO + (D P Y)^T dO', or dK += (scale dZ + scale' dZ')^T Q + scale dZ'^T Q'
      const Operand<T> rows = for_dv ? Operand<T>{dout().tangent, dout().value} : scores.q();
      add(rows.value, rows.tangent, Step::of(p, first_key).masked);
    }
  }

  TILEWISE_DEVICE void run_keys(int32_t first) {
    if (!Base::take_keys(first)) return;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const bool for_dv = i == 0;
      if ((for_dv ? g.dv.data : g.dk.data) == nullptr) continue;
      walk_rows(for_dv);
      Base::write_keys(for_dv ? g.dv : g.dk, for_dv ? p.head_dim_v : p.head_dim, 1.0f);
    }
  }

  // --- second_rows ---

  // Sums (of_score dZ + of_tangent dZ') K + of_score dZ' K' over the keys that the rows see.
  TILEWISE_DEVICE void walk_keys(Range rows, float of_score, float of_tangent) {
    Base::clear_sums();
    ptx::sync_block();
    begin_key_walk(shared().tile, shared().sequence.band.keys_of_any(rows));
    ptx::sync_block();
    for (int64_t at = next_key_tile(shared().mask.tiles.begin); at < shared().mask.tiles.end;
         at = next_key_tile(at + 1)) {
      const int64_t key = at * kTile;
      ptx::sync_block();
      load_keys(key);
      load_mask_bits(at, key);
      ptx::sync_block();
      store_gradients(key, of_score, of_tangent);
      add(scores.k().value, scores.k().tangent, Step::of(p, key).masked);
    }
  }

  // Computes dQ of the rows. Returns this thread's share of dscale.
  TILEWISE_DEVICE float run_rows(int64_t head, Range rows) {
    ptx::sync_block();
    load_rows_of({Packing{1}, head, rows});
    ptx::sync_block();
    float dscale = 0.0f;
    const bool wants_dscale = params.dscale_partials != nullptr;
    // Three sums, one after the other: dQ; dZ K + dZ' K' and dZ' K, both for dscale.
#pragma unroll 1
    for (int sum = 0; sum < 3; ++sum) {
      if (sum == 0 ? g.dq.data == nullptr : !wants_dscale) continue;
      if (sum == 2 && t.q.data == nullptr) continue;
      walk_keys(rows,
                sum == 0   ? scale()
                : sum == 1 ? 1.0f
                           : 0.0f,
                sum == 0   ? scale_tangent()
                : sum == 1 ? 0.0f
                           : 1.0f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = thread.y * 4 + i;
        if (r >= rows.size()) continue;
        if (sum == 0)
          write_dq(rows.begin + r, head, i);
        else
          dscale += Base::dot(sum == 1 ? scores.q().value : scores.q().tangent, r, i);
      }
    }
    return dscale;
  }

  TILEWISE_DEVICE void write_dq(int64_t row, int64_t head, int i) const {
    T* const to = static_cast<T*>(g.dq.data) + shared().sequence.row_offset(g.dq, row);
    Base::write(to + head * g.dq.stride_head, i, p.head_dim, 1.0f);
  }

  // --- second_dbias ---

  // Adds dbias of one head to the first group of the sums, which has the size of a tile of dbias.
  TILEWISE_DEVICE void add_dbias(int32_t head, int32_t row_tile, Range keys) {
    const Band& band = shared().sequence.band;
    const RowTile rows{Packing{1}, head, Tiling{band.rows, kTile}.at(row_tile)};
    ptx::sync_block();
    load_rows_of(rows);
    begin_key_walk(rows, keys);
    ptx::sync_block();
    const int64_t at = next_key_tile(shared().mask.tiles.begin);
    if (at >= shared().mask.tiles.end) return;  // the mask hides all of it
    const int64_t first_key = keys.begin;
    load_keys(first_key);
    load_mask_bits(at, first_key);
    ptx::sync_block();
    store_factors(first_key, false);
    combine_products(first_key, [&](int i, int j, float f, float e) {
      sums[0][i][j] += weights().at(i, j) * f + tangent_weights().at(i, j) * e;
    });
  }

  TILEWISE_DEVICE void run_dbias(int64_t block) {
    const auto tile = common::DbiasTile::of(p, g, block);
    Base::clear_sums();
    const auto begin = [&](int32_t batch) -> const Band& {
      ptx::sync_block();
      load_sequence(params, batch);
      return shared().sequence.band;
    };
    const auto begin_rows = [](Range) {};
    tile.for_each_part(p, g, begin, begin_rows, [&](int32_t head, int32_t row_tile) {
      add_dbias(head, row_tile, tile.keys(g));
    });
    tile.write(sums[0], g, {ptx::shared_address(shared().stage)});
  }
};

// Grid: heads_q * rows.count / rows.tile.
template <class C>
TILEWISE_KERNEL(kThreads, 1)
void second_prepare(TILEWISE_PARAMETER SecondParams params) {
  using T = typename C::Storage;
  ptx::griddepcontrol_wait();
  const Problem& p = params.problem;
  const Gradients& g = params.gradients;
  const Tangents& t = params.tangents;
  const HeadRows head_rows = HeadRows::of(params, ptx::block_index());
  const int64_t head = head_rows.head;
  for (int64_t row = head_rows.rows.begin + ptx::warp_index(); row < head_rows.rows.end;
       row += kThreads / ptx::kWarpSize) {
    const float delta = out_product<T>(p, p.out, t.dout, row, head) - dlse_of(t, row, head);
    float second_delta = out_product<T>(p, t.out, t.dout, row, head) - dlse_of(g, row, head);
    if (g.dout.data != nullptr) second_delta += out_product<T>(p, p.out, g.dout, row, head);
    if (ptx::lane_index() != 0) continue;
    const int64_t at = delta_index(params, row, head);
    params.row_delta[at] = delta;
    params.row_second_delta[at] = second_delta;
  }
}

template <class C>
TILEWISE_DEVICE void second_key_tile(const SecondParams& params, int32_t tile) {
  if (!load_key_tile(params, tile)) return;
  Second<C, true> second(params);
  for (int32_t key = 0; key < params.key_tile; key += kTile) second.run_keys(key);
}

// Grid: the key tiles of params.order; any size with key_flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void second_keys(TILEWISE_PARAMETER SecondParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.key_flags, [&](int32_t tile) { second_key_tile<C>(params, tile); });
}

template <class C>
TILEWISE_DEVICE void second_row_tile(const SecondParams& params, int32_t tile) {
  const HeadRows head_rows = HeadRows::of(params, tile);
  Second<C, false> second(params);
  float dscale = 0.0f;
  for (int64_t row = head_rows.rows.begin; row < head_rows.rows.end; row += kTile)
    dscale += second.run_rows(head_rows.head, {row, min(row + kTile, head_rows.rows.end)});
  if (params.dscale_partials != nullptr) second.write_dscale(tile, dscale);
}

// Grid: heads_q * rows.count / rows.tile; any size with row_flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void second_rows(TILEWISE_PARAMETER SecondParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.row_flags, [&](int32_t tile) { second_row_tile<C>(params, tile); });
}

// Grid: dbias_blocks(p, g).
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void second_dbias(TILEWISE_PARAMETER SecondParams params) {
  static_assert(kTile == common::kDbiasTile && kThreads == common::kDbiasThreads);
  Second<C, false> second(params);
  second.run_dbias(ptx::block_index());
}

}  // namespace tilewise::cuda::simt
