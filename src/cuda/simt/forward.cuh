// Forward (FlashAttention-2, algorithm 1):
//
//   for each kTile keys:  S = score_mod(Q K^T)   m' = max(m, rowmax S)   P = e^(S - m')
//                         l = l e^(m - m') + rowsum P   O = O e^(m - m') + dropout(P) V
//   at the end:           out = O / l   lse = m + log l   (or the partial result of a split)
//
// Grid: a CTA per work tile of params.order, or, with params.flags, any number of CTAs that compute
// the flagged tiles again. A CTA computes a tile of packed query rows over one split of the keys,
// kTile rows at a time. Thread (y, x) holds a 4x4 block of S and the same rows of O. Reads q, k, v,
// bias, sinks, the mask and the index arrays; writes out and lse, or partial_out and partial_lse,
// and raises max_logits.
#pragma once

#include "cuda/common/forward_results.h"
#include "cuda/common/max_logits.h"
#include "cuda/common/out.h"
#include "cuda/common/report.h"
#include "cuda/simt/recompute_tiles.h"

namespace tilewise::cuda::simt {

template <class C>
struct Forward {
  using T = typename C::Storage;

  const ForwardParams& params;
  const Problem& p;
  const TileOrder::WorkTile& work_tile;
  const bool general;
  const ThreadPosition thread;

  Block o[C::kGroups];
  float m[4];
  float l[4];  // sums over this thread's keys only

  TILEWISE_DEVICE Forward(const ForwardParams& all, const TileOrder::WorkTile& tile)
      : params(all),
        p(all.problem),
        work_tile(tile),
        general(is_general(p)),
        thread(ThreadPosition::of_this_thread()) {}

  TILEWISE_DEVICE void begin() {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) clear(o[g]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = kMinusInfinity;
      l[i] = 0.0f;
      if (thread.x == 0) shared().max_logit[thread.y * 4 + i] = kMinusInfinity;
    }
  }

  // Raises Shared::max_logit of the rows to the largest scale * q.k of a pair that is visible.
  // These are the products before every other score modification, and NaN where one of them is.
  // The loop takes them from shared memory and is not unrolled, so that it needs few registers.
  TILEWISE_DEVICE void track_max_logits(const Block& product, int64_t first_key) const {
    const auto products = ThreadWeights<true>::of(thread);
    products.store(product);
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int r = thread.y * 4 + i;
      float highest = kMinusInfinity;
      for (int j = 0; j < 4; ++j) {
        if (visible.sees(4 * i + j))
          highest =
              larger_logit(highest, ptx::mul(products.at(i, j), shared().score_mod.score.scale));
      }
      for (int lanes = 1; lanes < 16; lanes *= 2)
        highest = larger_logit(highest, ptx::shuffle_xor(highest, lanes));
      if (thread.x == 0) shared().max_logit[r] = larger_logit(shared().max_logit[r], highest);
    }
  }

  // Turns products into scores in natural units, rounded to fp32 as in the backward. The scores of
  // masked pairs become -inf; without `masked` no pair of this step is masked (Step).
  TILEWISE_DEVICE void finish_scores(Block& score, int64_t first_key, bool masked) const {
    if (!general) {
      const float scale = shared().score_mod.score.scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) score[i][j] = ptx::mul(score[i][j], scale);
      }
    }
    if (!masked) return;
    if (general) {
      const auto weights = ThreadWeights<true>::of(thread);
      weights.store(score);
      weights.change_visible(thread, first_key, [](float raw, int r, int64_t key) {
        return shared().score_mod.at(raw, shared().row_score_mod[r], key).value;
      });
      weights.load(score);
    }
    const Visible visible = Visible::of(thread, first_key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] = visible.sees(i, j) ? score[i][j] : kMinusInfinity;
    }
  }

  // Turns S into P and updates m, l and O.
  TILEWISE_DEVICE void softmax(Block& score) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float highest = max(max(score[i][0], score[i][1]), max(score[i][2], score[i][3]));
#pragma unroll
      for (int lanes = 1; lanes < 16; lanes *= 2)
        highest = max(highest, ptx::shuffle_xor(highest, lanes));
      const float raised = max(m[i], highest);
      const float base = exponent_base(raised);
      const float alpha = ptx::exp2_accurate(above(m[i], base) * kLog2e);
      m[i] = raised;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        score[i][j] = ptx::exp2_accurate((score[i][j] - base) * kLog2e);
        sum += score[i][j];
      }
      l[i] = l[i] * alpha + sum;
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[g][i][j] *= alpha;
      }
    }
  }

  TILEWISE_DEVICE void step(int64_t tile) {
    if constexpr (sizeof(T) == 2) {
      if (p.kv_float8 != 0) return step_of<Float8>(tile);
    }
    step_of<T>(tile);
  }

  // One step over kTile keys; K is the element type of k and v.
  template <class K>
  TILEWISE_DEVICE void step_of(int64_t tile) {
    Shared& memory = shared();
    const int64_t first_key = tile * kTile;
    ptx::sync_block();  // the key table and the bits of the previous step have been read
    load_key_table(p, first_key);
    load_mask_bits(tile, first_key);
    const auto columns = static_cast<int>(p.head_dim);
    Block weight;
    // S = score_mod(Q K^T)
    row_products(weight, memory.stage, Rows<T>{static_cast<const T*>(p.q.data), memory.q, columns},
                 Rows<K>{static_cast<const K*>(p.k.data), memory.k, columns});
    if (p.max_logits != nullptr) track_max_logits(weight, first_key);
    const Step now = Step::of(p, first_key);
    finish_scores(weight, first_key, now.masked);
    softmax(weight);  // m, P = e^(S - m), l; O is scaled
    // O += dropout(P) V
    const auto weights = ThreadWeights<true>::of(thread);
    weights.store(weight);
    if (memory.score_mod.dropout.on()) weights.apply_dropout(thread, first_key);
    const Rows<K> v{static_cast<const K*>(p.v.data), memory.v, static_cast<int>(p.head_dim_v)};
    add_weighted(o, memory.weights, memory.stage, v, now.masked);
  }

  // The softmax denominator of row i, whose weights e^(score - m) have the sum `sum`.
  TILEWISE_DEVICE RowNormaliser normaliser(int i, float sum) const {
    if (m[i] == kMinusInfinity) return {kNoKey, sum};
    return {0.0f, sum, m[i]};
  }

  // The logarithm is taken in double, because the backward computes all weights of the row from lse
  // and would repeat its rounding error in each of them.
  TILEWISE_DEVICE static LogSum log_sum(const RowNormaliser& row) {
    if (row.l == 0.0f) return {};
    const double exact = __builtin_log(static_cast<double>(row.l));
    const float log_l = static_cast<float>(exact);
    return LogSum::of(row.origin, log_l, static_cast<float>(exact - log_l));
  }

  TILEWISE_DEVICE void finish(int count) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = l[i];
#pragma unroll
      for (int lanes = 1; lanes < 16; lanes *= 2) sums[i] += ptx::shuffle_xor(sums[i], lanes);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool fits = shared().sequence.fits;
      RowNormaliser normal = normaliser(i, fits ? sums[i] : ptx::float_of(0x7fc00000u));
      const int r = thread.y * 4 + i;
      if (r >= count) continue;
      const Sequence& s = shared().sequence;
      const int64_t row = shared().row[r];
      const int64_t head = shared().head[r];
      if (p.max_logits != nullptr && thread.x == 0)
        raise_max_logit(p.max_logits + s.batch * p.heads_q + head,
                        fits ? shared().max_logit[r] : normal.l);
      float factor = v_descale(p, s.batch, shared().kv_head);
      if (p.sinks != nullptr && shared().splits == 1) factor *= normal.add_sink(p.sinks[head]);
      const float inverse = normal.l == 0.0f ? 0.0f : factor / normal.l;
      const LogSum sum = log_sum(normal);
      if (shared().splits > 1) {
        const int64_t at = (work_tile.split * partial_rows(p, params.partial_stride) +
                            partial_row(p, params.partial_stride, s, row)) *
                               p.heads_q +
                           head;
        if (thread.x == 0) params.partial_lse[at] = sum.lse;
        write_row(params.partial_out + at * p.head_dim_v, i, inverse);
      } else {
        if (thread.x == 0)
          store_log_sum(p, s.lse_offset(p.lse_stride_batch, row) + head * p.lse_stride_head, sum);
        with_out<T>(p, shared().out[r], [&](auto* out) { write_row(out, i, inverse); });
      }
    }
  }

  template <class Out>
  TILEWISE_DEVICE void write_row(Out* out, int i, float factor) const {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = g * kTile + thread.x * 4 + j;
        if (column < p.head_dim_v) out[column] = from_float<Out>(o[g][i][j] * factor);
      }
    }
  }

  TILEWISE_DEVICE void run(Range packed) {
    const RowTile tile{params.packing, work_tile.head * params.packing.group, packed};
    const Band& band = shared().sequence.band;
    ptx::sync_block();  // the table of the previous rows has been read
    const Range split_keys =
        key_split({0, band.keys}, shared().splits, work_tile.split, params.key_tile);
    const Range keys = intersect(band.keys_of_any(tile.rows()), split_keys);
    load_row_table(p, tile, p.out, split_keys);
    begin_key_walk(tile, keys);
    ptx::sync_block();
    begin();
    for (int64_t at = next_key_tile(shared().mask.tiles.begin); at < shared().mask.tiles.end;
         at = next_key_tile(at + 1))
      step(at);
    finish(static_cast<int>(packed.size()));
  }
};

// Checks the index entries of the sequence in shared memory, with the pages of `keys`. Clears
// Sequence::fits and reports the fault if one is invalid.
TILEWISE_DEVICE void find_faults(const ForwardParams& params, Range keys) {
  if (ptx::warp_index() != 0) return;  // a barrier follows before `fits` is read
  Sequence& s = shared().sequence;
  const Range entries = s.kv.entries(keys);
  const bool fits = s.fits && pages_fit(s, entries);
  if (fits || ptx::lane_index() != 0) return;
  s.fits = false;
  call_report_sequence(params, s, entries);
}

template <class C>
TILEWISE_DEVICE void forward_tile(const ForwardParams& params, int32_t tile) {
  const TileOrder::WorkTile work_tile = params.order.at(tile);
  if (work_tile.sequence < 0) return;
  load_sequence(params, work_tile.sequence);
  const int64_t begin = int64_t{work_tile.tile} * params.row_tile;
  const int64_t end =
      min(begin + params.row_tile, params.packing.packed(shared().sequence.band.rows));
  if (begin >= end) return;
  const int32_t splits = params.splits_of(shared().sequence.band);
  if (work_tile.split >= splits) return;
  if (ptx::thread_index() == 0) shared().splits = splits;
  find_faults(params, key_split({0, shared().sequence.band.keys}, splits, work_tile.split,
                                params.key_tile));
  if (params.problem.k_descale != nullptr) {
    if (ptx::thread_index() == 0)
      shared().score_mod.score =
          score_of(params.problem, work_tile.sequence,
                   work_tile.head * params.packing.group / group_size(params.problem));
    ptx::sync_block();
  }
  Forward<C> forward(params, work_tile);
  for (int64_t row = begin; row < end; row += kTile) forward.run({row, min(row + kTile, end)});
}

// Grid: the tiles of params.order; any size with flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void forward(TILEWISE_PARAMETER ForwardParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.flags, [&](int32_t tile) { forward_tile<C>(params, tile); });
}

}  // namespace tilewise::cuda::simt
