// Backward (FlashAttention-2, algorithm 2). No sum is shared between CTAs, so the results are
// deterministic: backward_keys owns keys and walks over rows, backward_rows owns rows and walks
// over keys.
//
//   S = score_mod(Q K^T)   P = e^(S - lse)   dP = dO V^T   dS = P (dP - delta)
//   keys:  dV = P^T dO   dK = dS^T Q        rows:  dQ = dS K
//
// backward_prepare  grid heads_q * padded row tiles; reads out, dout, dlse; writes row_delta
// backward_keys     grid the key tiles of params.order; reads q, k, v, dout, lse, row_delta; writes
//                   dk and dv. The scores are computed once for dV and once more for dK, so that a
//                   thread has one accumulator instead of two.
// backward_rows     grid heads_q * padded row tiles; reads q, k, v, out, dout, lse, dlse; writes dq
//                   and dscale_partials
//
// With key_flags or row_flags the last two compute only the tiles that another kernel family has
// flagged; the grid may then have any size.
#pragma once

#include "cuda/common/out.h"
#include "cuda/simt/recompute_tiles.h"

namespace tilewise::cuda::simt {

// The sum of x over the lanes of a warp, in all lanes.
TILEWISE_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int lanes = 1; lanes < ptx::kWarpSize; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
  return x;
}

// do.o of one row, computed by a warp, where `out` is out or its tangent and T the storage of dout.
template <class T>
TILEWISE_DEVICE float out_product(const Problem& p, const tilewise_tensor& out,
                                  const tilewise_tensor& dout, int64_t row, int64_t head) {
  const Sequence& s = shared().sequence;
  const T* const gradient =
      static_cast<const T*>(dout.data) + s.row_offset(dout, row) + head * dout.stride_head;
  const int64_t at = s.row_offset(out, row) + head * out.stride_head;
  return with_out<T>(p, out, at, [&](const auto* o) {
    float products = 0.0f;
    for (int c = ptx::lane_index(); c < p.head_dim_v; c += ptx::kWarpSize)
      products += to_float(o[c]) * to_float(gradient[c]);
    return warp_sum(products);
  });
}

// dlse of one row, of the gradients or of the tangents; 0 if it is absent.
template <class From>
TILEWISE_DEVICE float dlse_of(const From& from, int64_t row, int64_t head) {
  if (from.dlse == nullptr) return 0.0f;
  const int64_t at = shared().sequence.lse_offset(from.dlse_stride_batch, row);
  return from.dlse[at + head * from.dlse_stride_head];
}

// delta = do.o - dlse of one row, computed by a warp. With it dS = P (dP - delta) accounts for the
// gradients of both out and lse.
template <class T>
TILEWISE_DEVICE float row_delta(const BackwardParams& params, int64_t row, int64_t head) {
  const Problem& p = params.problem;
  const Gradients& g = params.gradients;
  return out_product<T>(p, p.out, g.dout, row, head) - dlse_of(g, row, head);
}

TILEWISE_DEVICE int64_t delta_index(const BackwardParams& params, int64_t row, int64_t head) {
  const Problem& p = params.problem;
  return head * params.rows.count(p) + params.rows.first(p, shared().sequence.batch) + row;
}

// The valid rows of a CTA's padded row tile, and their head. `of` loads the sequence.
struct HeadRows {
  int64_t head;
  Range rows;

  TILEWISE_DEVICE static HeadRows of(const BackwardParams& params, int64_t block) {
    const Problem& p = params.problem;
    const int64_t tiles = params.rows.count(p) / params.rows.tile;
    const PaddedRows::TileStart tile = params.rows.locate(p, block % tiles);
    if (tile.batch < 0) return {0, {0, 0}};
    load_sequence(params, tile.batch);
    const int64_t used = shared().sequence.band.rows;
    return {block / tiles, {tile.row0, min(tile.row0 + params.rows.tile, used)}};
  }
};

template <class C, bool kOwnsKeys>
struct Backward {
  using T = typename C::Storage;
  using Weights = ThreadWeights<!kOwnsKeys>;  // stored with the contracted dimension first

  const BackwardParams& params;
  const Problem& p;
  const Gradients& g;
  const bool general;
  const ThreadPosition thread;
  Block sums[C::kGroups];

  TILEWISE_DEVICE explicit Backward(const BackwardParams& all)
      : params(all),
        p(all.problem),
        g(all.gradients),
        general(is_general(all.problem)),
        thread(ThreadPosition::of_this_thread()) {}

  TILEWISE_DEVICE void clear_sums() {
#pragma unroll
    for (int i = 0; i < C::kGroups; ++i) clear(sums[i]);
  }

  // Whether delta is computed here. row_delta of another family has another meaning, so it is not
  // used for tiles that such a family has flagged.
  TILEWISE_DEVICE bool computes_delta() const {
    return !kOwnsKeys || params.key_flags.data != nullptr;
  }

  // Fills in the table of a tile of rows, with lse and delta. The caller provides the barriers
  // before and after.
  TILEWISE_DEVICE void load_rows_of(const RowTile& tile) const {
    load_row_table(p, tile, g.dout, {0, shared().sequence.band.keys});
    load_lse(p);
    if (computes_delta()) {
      for (int i = 0; i < kTile * ptx::kWarpSize / kThreads; ++i) {
        const int r = ptx::warp_index() * (kTile * ptx::kWarpSize / kThreads) + i;
        const int64_t packed = tile.packed.begin + r;
        if (packed >= tile.packed.end) break;
        const float delta =
            row_delta<T>(params, tile.packing.row(packed), tile.head0 + tile.packing.head(packed));
        if (ptx::lane_index() == 0) shared().delta[r] = delta;
      }
    }
    const int t = ptx::thread_index();
    const int64_t packed = tile.packed.begin + t;
    if (t >= kTile || packed >= tile.packed.end) return;
    const int64_t row = tile.packing.row(packed);
    const int64_t head = tile.head0 + tile.packing.head(packed);
    if (!computes_delta()) shared().delta[t] = params.row_delta[delta_index(params, row, head)];
  }

  // Turns S into P, times the derivative of the score if `derivative`; 0 where masked.
  TILEWISE_DEVICE void weights_of(Block& score, int64_t first_key, bool derivative) const {
    const Visible visible = Visible::of(thread, first_key);
    if (general) {
      const auto weights = Weights::of(thread);
      weights.store(score);
      weights.change_visible(thread, first_key, [derivative](float raw, int r, int64_t key) {
        const Score::Capped<float> at = shared().score_mod.at(raw, shared().row_score_mod[r], key);
        const float weight = weight_of(at.value, r);
        return derivative ? weight * at.derivative : weight;
      });
      weights.load(score);
    }
    const float scale = shared().score_mod.score.scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!general) score[i][j] = weight_of(ptx::mul(score[i][j], scale), thread.y * 4 + i);
        score[i][j] = visible.sees(i, j) ? score[i][j] : 0.0f;
      }
    }
  }

  TILEWISE_DEVICE Rows<T> rows_of(const tilewise_tensor& view, const int64_t* offsets,
                                  int64_t columns) const {
    return {static_cast<const T*>(view.data), offsets, static_cast<int>(columns)};
  }
  TILEWISE_DEVICE Rows<T> q() const { return rows_of(p.q, shared().q, p.head_dim); }
  TILEWISE_DEVICE Rows<T> k() const { return rows_of(p.k, shared().k, p.head_dim); }
  TILEWISE_DEVICE Rows<T> v() const { return rows_of(p.v, shared().v, p.head_dim_v); }
  TILEWISE_DEVICE Rows<T> dout() const { return rows_of(g.dout, shared().out, p.head_dim_v); }

  // Stores P, with dropout, in Shared::weights.
  TILEWISE_DEVICE void store_p(int64_t first_key) const {
    Block weight;
    row_products(weight, shared().stage, q(), k());
    weights_of(weight, first_key, false);
    const Weights weights = Weights::of(thread);
    weights.store(weight);
    if (shared().score_mod.dropout.on()) weights.apply_dropout(thread, first_key);
  }

  // Multiplies dP by the dropout factors.
  TILEWISE_DEVICE void apply_dropout(Block& dp, int64_t first_key) const {
    if (!shared().score_mod.dropout.on()) return;
    ptx::sync_block();  // the operands of the product have been read
    const Weights scratch = Weights::of(thread, shared().stage);
    scratch.store(dp);
    scratch.apply_dropout(thread, first_key);
    scratch.load(dp);
  }

  // Stores dS in Shared::weights.
  TILEWISE_DEVICE void store_ds(int64_t first_key) const {
    Block weight;
    row_products(weight, shared().stage, q(), k());
    weights_of(weight, first_key, true);
    const Weights weights = Weights::of(thread);
    weights.store(weight);  // frees its registers while dP is computed
    Block dp;
    row_products(dp, shared().stage, dout(), v());
    apply_dropout(dp, first_key);
    weights.load(weight);
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float delta = shared().delta[thread.y * 4 + i];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        weight[i][j] = visible.sees(i, j) ? weight[i][j] * (dp[i][j] - delta) : 0.0f;
    }
    weights.store(weight);
  }

  TILEWISE_DEVICE void add(const Rows<T>& b, bool masked) {
    add_weighted(sums, shared().weights, shared().stage, b, masked);
  }

  // Writes row `i` of this thread's sums to `to`.
  TILEWISE_DEVICE void write(T* to, int i, int64_t columns, float factor) const {
#pragma unroll
    for (int n = 0; n < C::kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = n * kTile + thread.x * 4 + j;
        if (column < columns) to[column] = from_float<T>(sums[n][i][j] * factor);
      }
    }
  }

  // --- backward_keys ---

  // The packed rows that see at least one of the keys.
  TILEWISE_DEVICE Range visible_rows() const {
    const Band& band = shared().sequence.band;
    const Range rows = intersect(band.rows_of_any(shared().current_keys), {0, band.rows});
    const int64_t group = group_size(p);
    return {rows.begin * group, max(rows.begin, rows.end) * group};
  }

  // Tile `at` of `visible_rows()`, which are computed anew each time to save registers.
  TILEWISE_DEVICE RowTile row_tile(int64_t at) const {
    const int64_t group = group_size(p);
    const Range rows = visible_rows();
    const int64_t first = rows.begin + at * kTile;
    return {Packing{group}, shared().tile_head * group, {first, min(first + kTile, rows.end)}};
  }

  // Starts the walk over the tiles of `visible_rows()`. The caller provides barriers.
  TILEWISE_DEVICE void begin_row_walk() const {
    if (ptx::warp_index() != 0) return;
    common::TileMask& mask = shared().mask;
    const Range rows = visible_rows();
    if (mask.on()) mask.list(Packing{group_size(p)}.rows(rows), shared().current_keys);
    if (ptx::lane_index() == 0) mask.begin_walk({0, ceil_div(rows.size(), kTile)});
  }

  // The first tile of the walk from `at` on.
  TILEWISE_DEVICE int64_t next_row_tile(int64_t at) const {
    return shared().mask.next(at, [&](int64_t tile) {
      const RowTile rows = row_tile(tile);
      return shared().mask.coverage_of(rows.heads(), rows.rows(), shared().current_keys);
    });
  }

  // Sums dV or dK over `visible_rows()`.
  TILEWISE_DEVICE void walk_rows(bool for_dv) {
    clear_sums();
    ptx::sync_block();
    begin_row_walk();
    ptx::sync_block();
    for (int64_t at = next_row_tile(0); at < shared().mask.tiles.end; at = next_row_tile(at + 1)) {
      ptx::sync_block();
      load_rows_of(row_tile(at));
      ptx::sync_block();
      load_key_table(p, shared().current_keys.begin);
      load_mask_bits(at, shared().current_keys.begin);
      ptx::sync_block();
      if (for_dv)
        store_p(shared().current_keys.begin);
      else
        store_ds(shared().current_keys.begin);
      // dV += P^T dO, or dK += dS^T Q
      add(for_dv ? dout() : q(), Step::of(p, shared().current_keys.begin).masked);
    }
  }

  TILEWISE_DEVICE void write_keys(const tilewise_tensor& view, int64_t columns,
                                  float factor) const {
    const Range& keys = shared().current_keys;
    const Sequence& s = shared().sequence;
    const KvSource source = gradient_source(p, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = keys.begin + thread.y * 4 + i;
      if (key >= keys.end) continue;
      T* const to = static_cast<T*>(view.data) + source.offset(view, key) +
                    shared().tile_head * view.stride_head;
      write(to, i, columns, factor);
    }
  }

  // Takes the kTile keys of the tile that start at its key `first`; false: there are none.
  TILEWISE_DEVICE static bool take_keys(int32_t first) {
    ptx::sync_block();
    if (ptx::thread_index() == 0) {
      const int64_t begin = shared().tile_keys.begin + first;
      shared().current_keys = {begin, min(begin + kTile, shared().tile_keys.end)};
    }
    ptx::sync_block();
    return !shared().current_keys.empty();
  }

  TILEWISE_DEVICE void run_keys(int32_t first) {
    if (!take_keys(first)) return;
    if (g.dv.data != nullptr) {
      walk_rows(true);
      write_keys(g.dv, p.head_dim_v, 1.0f);
    }
    if (g.dk.data != nullptr) {
      walk_rows(false);
      write_keys(g.dk, p.head_dim, shared().score_mod.score.scale);
    }
  }

  // --- backward_rows ---

  // Computes dQ of the rows. Returns this thread's share of dscale, the sum of q.(dq / scale).
  TILEWISE_DEVICE float run_rows(int64_t head, Range rows) {
    const RowTile tile{Packing{1}, head, rows};
    const Range keys = shared().sequence.band.keys_of_any(rows);
    clear_sums();
    ptx::sync_block();
    load_rows_of(tile);
    begin_key_walk(tile, keys);
    ptx::sync_block();
    for (int64_t at = next_key_tile(shared().mask.tiles.begin); at < shared().mask.tiles.end;
         at = next_key_tile(at + 1)) {
      const int64_t key = at * kTile;
      ptx::sync_block();
      load_key_table(p, key);
      load_mask_bits(at, key);
      store_ds(key);
      add(k(), Step::of(p, key).masked);  // dQ += dS K
    }
    float dscale = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread.y * 4 + i;
      if (r >= rows.size()) continue;
      const int64_t row = rows.begin + r;
      const Sequence& s = shared().sequence;
      if (g.dq.data != nullptr)
        write(static_cast<T*>(g.dq.data) + s.row_offset(g.dq, row) + head * g.dq.stride_head, i,
              p.head_dim, shared().score_mod.score.scale);
      if (params.dscale_partials != nullptr) dscale += dot(q(), r, i);
    }
    return dscale;
  }

  // Row r of `rows` times row i of this thread's sums, which is row r of the tile.
  TILEWISE_DEVICE float dot(const Rows<T>& rows, int r, int i) const {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += rows.at(r, n * kTile + thread.x * 4 + j) * sums[n][i][j];
    }
    return sum;
  }

  // Adds `dscale` of all threads of the CTA in a fixed order and writes the sum.
  TILEWISE_DEVICE void write_dscale(int32_t tile, float dscale) const {
    const float sum = warp_sum(dscale);
    ptx::sync_block();
    if (ptx::lane_index() == 0) shared().delta[ptx::warp_index()] = sum;
    ptx::sync_block();
    if (ptx::thread_index() != 0) return;
    float total = 0.0f;
    for (int i = 0; i < kThreads / ptx::kWarpSize; ++i) total += shared().delta[i];
    params.dscale_partials[tile] = total;
  }
};

// Grid: heads_q * rows.count / rows.tile.
template <class C>
TILEWISE_KERNEL(kThreads, 1)
void backward_prepare(TILEWISE_PARAMETER BackwardParams params) {
  ptx::griddepcontrol_wait();
  const HeadRows head_rows = HeadRows::of(params, ptx::block_index());
  for (int64_t row = head_rows.rows.begin + ptx::warp_index(); row < head_rows.rows.end;
       row += kThreads / ptx::kWarpSize) {
    const float delta = row_delta<typename C::Storage>(params, row, head_rows.head);
    if (ptx::lane_index() == 0) params.row_delta[delta_index(params, row, head_rows.head)] = delta;
  }
}

// Loads work tile `tile` of the keys; false: there is none.
TILEWISE_DEVICE bool load_key_tile(const BackwardParams& params, int32_t tile) {
  const TileOrder::WorkTile work_tile = params.order.at(tile);
  if (work_tile.sequence < 0) return false;
  load_sequence(params, work_tile.sequence);
  if (ptx::thread_index() == 0) {
    const int64_t begin = int64_t{work_tile.tile} * params.key_tile;
    shared().tile_keys = {begin, min(begin + params.key_tile, shared().sequence.band.keys)};
    shared().tile_head = work_tile.head;
  }
  return true;
}

template <class C>
TILEWISE_DEVICE void backward_key_tile(const BackwardParams& params, int32_t tile) {
  if (!load_key_tile(params, tile)) return;
  Backward<C, true> backward(params);
  for (int32_t key = 0; key < params.key_tile; key += kTile) backward.run_keys(key);
}

// Grid: the key tiles of params.order; any size with key_flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void backward_keys(TILEWISE_PARAMETER BackwardParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.key_flags, [&](int32_t tile) { backward_key_tile<C>(params, tile); });
}

template <class C>
TILEWISE_DEVICE void backward_row_tile(const BackwardParams& params, int32_t tile) {
  const HeadRows head_rows = HeadRows::of(params, tile);
  Backward<C, false> backward(params);
  float dscale = 0.0f;
  for (int64_t row = head_rows.rows.begin; row < head_rows.rows.end; row += kTile)
    dscale += backward.run_rows(head_rows.head, {row, min(row + kTile, head_rows.rows.end)});
  if (params.dscale_partials != nullptr) backward.write_dscale(tile, dscale);
}

// Grid: heads_q * rows.count / rows.tile; any size with row_flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void backward_rows(TILEWISE_PARAMETER BackwardParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.row_flags, [&](int32_t tile) { backward_row_tile<C>(params, tile); });
}

}  // namespace tilewise::cuda::simt
