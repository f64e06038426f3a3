// Tangents of out and lse (forward mode). With s' the tangents of the scores, and lse known, so
// that there is no maximum to keep:
//
//   for each kTile keys:  P = e^(score_mod(Q K^T) - lse)
//                         W = P (s' - r)   u = u + rowsum W   O' = O' + dropout(W) V + dropout(P)
//                         V'
//   at the end:           lse' = r + u   out' = O' - u out
//
// The last line holds for every r, because the weights, that of the sink included, sum to 1. r is
// the mean of s' over the first tile that a row sees. What the tangents of all keys share, such as
// the tangent of a time embedding, then never enters W, whose rounding it would dominate.
//
// A CTA computes a work tile of params.order, as in the forward, with all keys of its rows; with
// flags it computes its share of the flagged tiles. Products whose tangent is absent are left out.
// Reads q, k, v, bias, sinks, out, lse, their tangents and the index arrays; writes tangents.out
// and tangents.lse.
#pragma once

#include "cuda/simt/forward.cuh"
#include "cuda/simt/score_tangents.h"

namespace tilewise::cuda::simt {

template <class C>
struct Jvp {
  using T = typename C::Storage;
  using Scores = ScoreTangents<T, true>;

  const Problem& p;
  const Tangents& t;
  const ThreadPosition thread;
  const Scores scores;

  Block o[C::kGroups];
  float reference[4];      // r
  uint32_t has_reference;  // bit i: r of row i has been found
  float mean[4];           // u, summed over this thread's keys only

  TILEWISE_DEVICE explicit Jvp(const JvpParams& params)
      : p(params.problem),
        t(params.tangents),
        thread(ThreadPosition::of_this_thread()),
        scores{p, t, thread} {}

  TILEWISE_DEVICE void begin() {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) clear(o[g]);
#pragma unroll
    for (int i = 0; i < 4; ++i) reference[i] = mean[i] = 0.0f;
    has_reference = 0;
  }

  // The sum of x over the threads that hold keys of the same rows.
  TILEWISE_DEVICE static float row_sum(float x) {
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
    return x;
  }

  // Sets r of the rows that see keys for the first time.
  TILEWISE_DEVICE void set_references(const Block& weight, const Block& tangent) {
    if (!ptx::any(has_reference != 0xf)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float total = 0.0f;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total += weight[i][j];
        sum += weight[i][j] * tangent[i][j];
      }
      total = row_sum(total);
      sum = row_sum(sum);
      if ((has_reference >> i & 1) != 0 || !(total > 0.0f)) continue;
      reference[i] = sum / total;
      has_reference |= 1u << i;
    }
  }

  // O' = O' + dropout(weight) B. All threads must have read Shared::weights before.
  TILEWISE_DEVICE void add(const Block& weight, const Rows<T>& b, const Step& now) {
    const auto weights = ThreadWeights<true>::of(thread);
    weights.store(weight);
    if (shared().score_mod.dropout.on()) weights.apply_dropout(thread, now.first_key);
    add_weighted(o, shared().weights, shared().stage, b, now.masked);
  }

  TILEWISE_DEVICE void step(int64_t tile) {
    const int64_t first_key = tile * kTile;
    ptx::sync_block();  // the key table and the bits of the previous step have been read
    load_key_table(p, first_key);
    load_mask_bits(tile, first_key);
    scores.load_key_table(first_key);
    Block weight;
    Block tangent;
    scores.products(weight, tangent);
    const Step now = Step::of(p, first_key);
    scores.weigh(weight, tangent, first_key);  // P and s'
    if (scores.any()) {
      // W = P (s' - r), u += rowsum W, O' += dropout(W) V
      set_references(weight, tangent);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          tangent[i][j] = weight[i][j] * (tangent[i][j] - reference[i]);
          mean[i] += tangent[i][j];
        }
      }
      add(tangent, scores.v().value, now);
      if (t.v.data != nullptr) ptx::sync_block();
    }
    if (t.v.data != nullptr) add(weight, scores.v().tangent, now);  // O' += dropout(P) V'
  }

  // The sink is a key without a value. Returns its share of u.
  TILEWISE_DEVICE float sink_share(int i, int64_t row, int64_t head) const {
    if (p.sinks == nullptr || p.sinks[head] == kMinusInfinity) return 0.0f;
    const int64_t at =
        shared().sequence.lse_offset(p.lse_stride_batch, row) + head * p.lse_stride_head;
    const LogSum sum{p.lse[at], p.lse_low != nullptr ? p.lse_low[at] : 0.0f};
    const float weight = ptx::exp2_accurate(LogSum{p.sinks[head]}.above(sum) * kLog2e);
    const float tangent = t.sinks != nullptr ? t.sinks[head] : 0.0f;
    return weight * (tangent - reference[i]);
  }

  TILEWISE_DEVICE void finish() const {
    const Sequence& s = shared().sequence;
    const auto count = static_cast<int>(shared().tile.packed.size());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = row_sum(mean[i]);
      const int r = thread.y * 4 + i;
      if (r >= count) continue;
      const int64_t row = shared().row[r];
      const int64_t head = shared().head[r];
      sum = s.fits ? sum + sink_share(i, row, head) : ptx::float_of(0x7fc00000u);
      if (thread.x == 0 && t.lse != nullptr)
        t.lse[s.lse_offset(t.lse_stride_batch, row) + head * t.lse_stride_head] =
            reference[i] + sum;
      const int64_t at = s.row_offset(t.out, row) + head * t.out.stride_head;
      with_out<T>(p, shared().out[r], [&](auto* out) {
        write_row(i, out, static_cast<decltype(out)>(t.out.data) + at, sum);
      });
    }
  }

  template <class Out>
  TILEWISE_DEVICE void write_row(int i, const Out* out, Out* to, float sum) const {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = g * kTile + thread.x * 4 + j;
        if (column < p.head_dim_v)
          to[column] = from_float<Out>(o[g][i][j] - to_float(out[column]) * sum);
      }
    }
  }

  TILEWISE_DEVICE void run(const RowTile& tile) {
    const Band& band = shared().sequence.band;
    ptx::sync_block();  // the table of the previous rows has been read
    const Range keys = band.keys_of_any(tile.rows());
    load_row_table(p, tile, p.out, {0, band.keys});
    load_lse(p);
    scores.load_row_table();
    begin_key_walk(tile, keys);
    ptx::sync_block();
    begin();
    for (int64_t at = next_key_tile(shared().mask.tiles.begin); at < shared().mask.tiles.end;
         at = next_key_tile(at + 1))
      step(at);
    finish();
  }
};

template <class C>
TILEWISE_DEVICE void jvp_tile(const JvpParams& params, int32_t tile) {
  const TileOrder::WorkTile work_tile = params.order.at(tile);
  if (work_tile.sequence < 0) return;
  load_sequence(params, work_tile.sequence);
  const Band& band = shared().sequence.band;
  const int64_t begin = int64_t{work_tile.tile} * params.row_tile;
  const int64_t end = min(begin + params.row_tile, params.packing.packed(band.rows));
  if (begin >= end) return;
  find_faults(params, {0, band.keys});
  Jvp<C> jvp(params);
  const int64_t first_head = work_tile.head * params.packing.group;
  for (int64_t row = begin; row < end; row += kTile)
    jvp.run({params.packing, first_head, {row, min(row + kTile, end)}});
}

// Grid: the tiles of params.order; any size with flags.
template <class C>
TILEWISE_KERNEL(kThreads, C::kBlocksPerSm)
void jvp(TILEWISE_PARAMETER JvpParams params) {
  ptx::griddepcontrol_wait();
  for_each_tile(params.flags, [&](int32_t tile) { jvp_tile<C>(params, tile); });
}

}  // namespace tilewise::cuda::simt
