// Tangents of out and lse (forward mode) on tensor cores, for 16-bit elements. out and lse are
// known, so that there is no maximum to keep. With s' the tangents of the scores and r any number
// per row:
//
//   for each key tile:  S = Q K^T   S' = scale (Q' K^T + Q K'^T) + scale' S
//                       P = e^(scale S - lse)   W = P (S' - r)
//                       u = u + rowsum W   O' = O' + W V + P V'
//   at the end:         lse' = r + u   out' = O' - u out
//
// simt/jvp.cuh says why r does not matter, except for rounding: W is rounded to 16 bits, and so was
// out. Here r is the mean of s' over the last tile that all rows of the CTA see in full or, where
// there is none, over all keys of the row; a first pass over these tiles computes it from S and S'.
// (The first tile that a row sees may hold one key of little weight, far from the others.)
//
// A CTA computes one tile of packed query rows of one key/value head with all of its keys, which it
// walks from the last tile to the first, as the forward does (forward.cuh). No warp is specialised:
// each copies, and owns the same rows in all products.
//
// What passes through shared memory: Q and Q', loaded once; K with K', and V with V', each pair in
// stages of its own. One pair is copied with cp.async while the other is multiplied:
//   wait K, K'   barrier   copy V, V' of the tile       S and S', then P and W in registers
//   wait V, V'   barrier   copy K, K' of the next one   O' += W V + P V'
//
// Tangents that are absent are neither copied nor multiplied. Where sums are not finite, because of
// 0 * NaN of a key that the row does not see or because W overflows fp16, the CTA sets its flag
// (Flags).
#pragma once

#include "attention/online_softmax.h"
#include "cuda/mma_sync/tangent_products.cuh"

namespace tilewise::cuda::mma_sync {

// Shared memory holds Q, the QueryTile, the stages of K, K', V and V', Q', and TangentRows.
template <class C>
inline constexpr int kTangentQueriesAt = kPipelineAt<C> + 4 * kStageBytes<C>;
template <class C>
inline constexpr int kTangentRowsAt = kTangentQueriesAt<C> + kQueryTileBytes<C>;
template <class C>
inline constexpr int kJvpSharedBytes = kTangentRowsAt<C> + C::kForward.rows() * 16;

// The stages of a CTA.
template <class C>
struct TangentStages {
  ptx::SharedAddress k;
  ptx::SharedAddress k_tangent;
  ptx::SharedAddress v;
  ptx::SharedAddress v_tangent;

  TILEWISE_DEVICE explicit TangentStages(ptx::SharedAddress base)
      : k(base),
        k_tangent(k + kStageBytes<C>),
        v(k_tangent + kStageBytes<C>),
        v_tangent(v + kStageBytes<C>) {}

  TILEWISE_DEVICE void copy_keys(const JvpParams& p, const QueryTile& q_tile, int32_t tile) const {
    copy(k, p, p.problem.k, p.problem.head_dim, q_tile, tile);
    if (p.tangents.k.data != nullptr)
      copy(k_tangent, p, p.tangents.k, p.problem.head_dim, q_tile, tile);
    tile::commit<typename C::Arch>();
  }
  TILEWISE_DEVICE void copy_values(const JvpParams& p, const QueryTile& q_tile,
                                   int32_t tile) const {
    copy(v, p, p.problem.v, p.problem.head_dim_v, q_tile, tile);
    if (p.tangents.v.data != nullptr)
      copy(v_tangent, p, p.tangents.v, p.problem.head_dim_v, q_tile, tile);
    tile::commit<typename C::Arch>();
  }

 private:
  // Copies a tile of `view`, which has the layout of k or v. Rows past the last key become 0.
  // Everything is computed anew for each tile, since registers are scarce.
  TILEWISE_DEVICE static void copy(ptx::SharedAddress stage, const JvpParams& p,
                                   const tilewise_tensor& view, int64_t columns,
                                   const QueryTile& q_tile, int32_t tile) {
    using Lanes = typename KvPipeline<C>::Lanes;
    constexpr int kBytes = C::Element::kBytes;
    const Lanes lanes(opaque_thread<C>());
    bool exists[Lanes::kColumns];
#pragma unroll
    for (int column = 0; column < Lanes::kColumns; ++column)
      exists[column] = lanes.chunk_of(column) * (16 / kBytes) < columns;
    const KvSource& kv = q_tile.sequence.kv;
    const int32_t key = tile * C::kForward.keys + lanes.row;
    const int64_t offset = p.group.quotient(q_tile.rows.first_head) * view.stride_head +
                           kv.batch_index * view.stride_batch + (kv.first + key) * view.stride_row;
    const char* row = static_cast<const char*>(view.data) + offset * kBytes + lanes.chunk * 16;
    copy_rows<C>(stage, lanes, row, view.stride_row * kBytes, q_tile.tiles.keys - key, exists);
  }
};

// The statistics of a warp's rows: lse and r, in shared memory because registers are scarce, and u.
template <class C>
class TangentRows {
 public:
  static constexpr int kRows = C::kForward.warp_rows / 16;

  float mean[kRows][2];  // u, summed over this lane's keys only

  TILEWISE_DEVICE TangentRows(const Problem& p, const QueryTile& q_tile, ptx::SharedAddress at)
      : at_(at + static_cast<uint32_t>(lane_position<C>().row0 * 16)) {
    const LanePosition position = lane_position<C>();
    for_each_row([&](int m, int h) {
      const int32_t r = position.row(m, h);
      LogSum sum;
      if (r < q_tile.rows.count) sum = log_sum(p, q_tile, r);
      const float minus_lse = sum.lse == kMinusInfinity ? kMinusInfinity : -sum.lse;
      const uint32_t x[4] = {ptx::bits_of(minus_lse), ptx::bits_of(-sum.low * kLog2e), 0, 0};
      ptx::st_shared_v4_b32(row(m, h), x);
      mean[m][h] = 0.0f;
    });
    ptx::sync_warp();
  }

  // Turns q.k and its tangent into the weights P and the tangents s' of the scores.
  TILEWISE_DEVICE void weigh(Scores<C>& s, Scores<C>& s_tangent, float scale,
                             float scale_tangent) const {
    for_each_row([&](int m, int h) {
      uint32_t bits[2];
      ptx::ld_shared_v2_b32(bits, row(m, h));
      const float minus_lse = ptx::float_of(bits[0]);
      const float minus_low = ptx::float_of(bits[1]);
      for_each_key(h, [&](int n, int e) {
        float& x = s.x[m][n][e];
        float& x_tangent = s_tangent.x[m][n][e];
        x_tangent = ptx::fma(x_tangent, scale, x * scale_tangent);
        x = ptx::ex2(ptx::fma(ptx::fma(x, scale, minus_lse), kLog2e, minus_low));
      });
    });
  }

  // While r is sought, `mean` holds sums of weighted tangents, and `reference` those of the
  // weights. Where the weights are 0 in fp32, all keys count alike.
  TILEWISE_DEVICE void add_to_references(const Scores<C>& weight, const Scores<C>& s_tangent) {
    constexpr float kLeast = 1e-30f;
    for_each_row([&](int m, int h) {
      float total = 0.0f;
      for_each_key(h, [&](int n, int e) {
        const float x = weight.x[m][n][e] + kLeast;
        total += x;
        mean[m][h] = ptx::fma(x, s_tangent.x[m][n][e], mean[m][h]);
      });
      total = tile::quad_sum(total) + reference(m, h);
      ptx::sync_warp();
      set_reference(m, h, total);
    });
    ptx::sync_warp();
  }
  TILEWISE_DEVICE void set_references() {
    for_each_row([&](int m, int h) {
      const float total = reference(m, h);  // 0 if the sequence has no key
      const float r = tile::quad_sum(mean[m][h]) / (total == 0.0f ? 1.0f : total);
      // No key counts where lse is infinite, and r + u is the tangent of the sink alone.
      const float minus_lse = ptx::float_of(ptx::ld_shared_b32(row(m, h)));
      mean[m][h] = 0.0f;
      ptx::sync_warp();
      set_reference(m, h, minus_lse * 0.0f == 0.0f ? r : 0.0f);
    });
    ptx::sync_warp();
  }

  // Turns the tangents s' into W, and adds W to u.
  TILEWISE_DEVICE void centre(const Scores<C>& weight, Scores<C>& s_tangent) {
    for_each_row([&](int m, int h) {
      const float r = reference(m, h);
      for_each_key(h, [&](int n, int e) {
        float& x = s_tangent.x[m][n][e];
        x = weight.x[m][n][e] * (x - r);
        mean[m][h] += x;
      });
    });
  }

  // Completes u: sums of quads, and the sink, which is a key without a value. Writes lse'.
  TILEWISE_DEVICE void finish(const JvpParams& p, const QueryTile& q_tile) {
    const Problem& problem = p.problem;
    const Tangents& t = p.tangents;
    const LanePosition position = lane_position<C>();
    for_each_row([&](int m, int h) {
      const int32_t r = position.row(m, h);
      float& u = mean[m][h];
      u = tile::quad_sum(u);
      if (r >= q_tile.rows.count) return;
      const int32_t head = q_tile.head(r);
      if (problem.sinks != nullptr && problem.sinks[head] != kMinusInfinity) {
        const LogSum sum = log_sum(problem, q_tile, r);
        const float weight = ptx::ex2(LogSum{problem.sinks[head]}.above(sum) * kLog2e);
        const float s_tangent = t.sinks != nullptr ? t.sinks[head] : 0.0f;
        u = ptx::fma(weight, s_tangent - reference(m, h), u);
      }
      if (!q_tile.sequence.fits) u = ptx::float_of(0x7fc00000u);
      if (t.lse == nullptr || position.column != 0) return;
      const int32_t i = q_tile.rows.first + q_tile.rows.row(r);
      t.lse[q_tile.sequence.lse_offset(t.lse_stride_batch, i) + head * t.lse_stride_head] =
          reference(m, h) + u;
    });
  }

 private:
  template <class Do>
  TILEWISE_DEVICE static void for_each_row(const Do& with) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) with(m, h);
    }
  }
  // The keys (n, e) of a lane in row (m, h), in the order of `Sums`.
  template <class Do>
  TILEWISE_DEVICE static void for_each_key(int h, const Do& with) {
#pragma unroll
    for (int n = 0; n < C::kForward.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) with(n, 2 * h + e);
    }
  }

  TILEWISE_DEVICE static LogSum log_sum(const Problem& p, const QueryTile& q_tile, int32_t r) {
    const int64_t at = lse_index(p, q_tile, r);
    return {p.lse[at], p.lse_low != nullptr ? p.lse_low[at] : 0.0f};
  }

  // Four floats: -lse, or -inf for rows without keys and past the last row, which makes all weights
  // 0; minus the low part of lse (Problem::lse_low), in units of ln 2; r; and nothing.
  TILEWISE_DEVICE ptx::SharedAddress row(int m, int h) const {
    return at_ + static_cast<uint32_t>((16 * m + 8 * h) * 16);
  }
  TILEWISE_DEVICE float reference(int m, int h) const {
    return ptx::float_of(ptx::ld_shared_b32(row(m, h) + 8));
  }
  // One lane of four writes: theirs are equal, but NaNs may differ in their bits.
  TILEWISE_DEVICE void set_reference(int m, int h, float r) const {
    if (ptx::lane_index() % 4 == 0) ptx::st_shared_b32(row(m, h) + 8, ptx::bits_of(r));
  }

  ptx::SharedAddress at_;
};

// Reads the warp's rows of out from the Q tile, and replaces them by O' - u out.
template <class C>
TILEWISE_DEVICE void stage_tangents(ptx::SharedAddress q, const Outputs<C>& o,
                                    const float (&u)[C::kForward.warp_rows / 16][2]) {
  using Element = typename C::Element;
  const OutputLane<C> lane(q, lane_position<C>());
#pragma unroll
  for (int m = 0; m < C::kForward.warp_rows / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const ptx::SharedAddress at = lane.at(m, h, n);
        const uint32_t out = ptx::ld_shared_b32(at);
        ptx::st_shared_b32(
            at, tile::pack<Element>(
                    ptx::fma(-u[m][h], tile::low_of<Element>(out), o.x[m][n][2 * h]),
                    ptx::fma(-u[m][h], tile::high_of<Element>(out), o.x[m][n][2 * h + 1])));
      }
    }
  }
}

// Grid: the tiles of params.order.
template <class C>
TILEWISE_KERNEL(C::kForward.threads(), C::kForward.blocks_per_sm)
void jvp(TILEWISE_PARAMETER JvpParams p) {
  const Problem& problem = p.problem;
  const Tangents& t = p.tangents;
  ptx::griddepcontrol_wait();
  if (p.flags.data != nullptr && ptx::thread_index() == 0) p.flags.data[ptx::block_index()] = 0;
  QueryTile q_tile = QueryTile::of(p, p.order.at(ptx::block_index()), C::kForward.keys);
  if (!q_tile.any()) return;

  const ptx::SharedAddress q = ptx::shared_address(ptx::shared_memory());
  load_query_rows<C>(problem.q, problem.head_dim, q_tile, q);
  if (t.q.data != nullptr)
    load_query_rows<C>(t.q, problem.head_dim, q_tile, q + kTangentQueriesAt<C>);
  tile::commit<typename C::Arch>();
  q_tile.tiles.find_full(q_tile.rows, C::kForward.keys);
  if (ptx::thread_index() == 0) saved_q_tile<C>() = q_tile;
  ptx::sync_block();
  const QueryTile& saved = saved_q_tile<C>();

  const bool of_q = t.q.data != nullptr;
  const bool of_k = t.k.data != nullptr;
  const bool of_scores = of_q || of_k || t.scale != nullptr;
  const float scale = score_of(problem).scale;
  const float scale_tangent = t.scale != nullptr ? *t.scale : 0.0f;
  const TangentStages<C> stages(q + kPipelineAt<C>);
  const TangentProducts<C> score_products;
  const Products<C> products;
  const auto nothing_to_load = [](int) {};
  TangentRows<C> rows(problem, saved, q + kTangentRowsAt<C>);
  Scores<C> s;
  Scores<C> s_tangent;
  Outputs<C> o;
  o.fill(0.0f);
#pragma unroll 1
  for (int phase = of_scores ? 0 : 1; phase < 2; ++phase) {
    const bool seeks_references = phase == 0;
    const bool one_tile = seeks_references && saved.tiles.full_begin < saved.tiles.full_end;
    const int32_t last = ptx::uniform(one_tile ? saved.tiles.full_end - 1 : saved.tiles.last);
    const int32_t first = ptx::uniform(one_tile ? last : saved.tiles.first);
    if (last >= first) stages.copy_keys(p, saved, last);
#pragma unroll 1
    for (int32_t tile = last; tile >= first; --tile) {
      wait_for_all<C>();
      if (!seeks_references) stages.copy_values(p, saved, tile);
      const ptx::SharedAddress q_rows = q + first_byte_of_warp<C>();
      const ptx::SharedAddress q_tangent_rows = q_rows + kTangentQueriesAt<C>;
      // Q K^T, and Q' K^T + Q K'^T
      score_products.compute(s, s_tangent, {q_rows, q_tangent_rows, of_q},
                             {stages.k, stages.k_tangent, of_k});
      rows.weigh(s, s_tangent, scale, scale_tangent);  // P and S'
      if (saved.tiles.masked(tile)) hide<C>(saved, tile, s, s_tangent);
      if (seeks_references)
        rows.add_to_references(s, s_tangent);
      else if (of_scores)
        rows.centre(s, s_tangent);  // W = P (S' - r), u += rowsum W

      wait_for_all<C>();
      if (tile > first) stages.copy_keys(p, saved, tile - 1);
      if (seeks_references) continue;
      // O' += W V + P V'
      if (of_scores) products.values(o, s_tangent, stages.v, nothing_to_load);
      if (t.v.data != nullptr) products.values(o, s, stages.v_tangent, nothing_to_load);
    }
    if (seeks_references) rows.set_references();
  }

  wait_for_all<C>();
  load_query_rows<C>(problem.out, problem.head_dim_v, saved, q);
  tile::commit<typename C::Arch>();
  if (!saved.sequence.fits && ptx::thread_index() == 0) [[unlikely]]
    call_report_sequence<ForwardParams>(p, saved.sequence, {});
  rows.finish(p, saved);
  if (p.flags.data != nullptr && !outputs_are_finite(saved, lane_position<C>(), o, rows.mean))
      [[unlikely]]
    p.flags.data[ptx::block_index()] = 1;  // barriers order it after the 0 of the start
  wait_for_all<C>();
  stage_tangents<C>(q, o, rows.mean);
  ptx::sync_warp();
  store_rows<C>(t.out, problem.head_dim_v, saved, q);
}

}  // namespace tilewise::cuda::mma_sync
