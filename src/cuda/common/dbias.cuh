// The gradient of bias:
//
//   dbias = sum over the broadcast dimensions of P (dP * dropout - delta),
//   P = exp(score - lse), dP = dO V^T, delta = rowsum(dO O) - dlse
//
// Grid: dbias_blocks(p, g), one CTA per 64 x 64 tile of dbias. Reads q, k, v, out, dout, lse, dlse,
// bias and the mask; writes dbias. The arithmetic is fp32 for every element type.
#pragma once

#include "attention/online_softmax.h"
#include "attention/schedule.h"
#include "cuda/common/dbias_tile.h"
#include "cuda/common/out.h"
#include "cuda/common/score_mod.h"
#include "cuda/common/tile_mask.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// A CTA has 16 x 16 threads, each of which holds 4 rows and 4 keys of the tile.
template <class Element>
struct Dbias {
  using T = typename Element::Storage;
  static constexpr int kMicro = kDbiasMicro;
  static constexpr int kSide = DbiasTile::kSide;
  static constexpr int kLoads = 2;  // rows of an operand that a thread loads
  using Micro = DbiasMicro;

  // Kept in shared memory: it would occupy a third of the registers during the whole kernel.
  struct State {
    Sequence sequence;
    ScoreMod score_mod;
    TileMask mask;
  };
  static_assert(sizeof(State) <= kDbiasStateBytes);

  const Problem& p;
  const Gradients& g;
  const tilewise_mask& mask;
  SharedWords a;  // [column][row]
  SharedWords b;  // [column][key]
  SharedWords lse;
  SharedWords delta;
  SharedWords lse_low;

  TILEWISE_DEVICE explicit Dbias(const DbiasParams& params)
      : p(params.problem),
        g(params.gradients),
        mask(params.mask),
        a(shared_words(0)),
        b(shared_words(kDbiasDepth * kDbiasStride * 4)),
        lse(shared_words(2 * kDbiasDepth * kDbiasStride * 4)),
        delta(shared_words((2 * kDbiasDepth * kDbiasStride + kDbiasTile) * 4)),
        lse_low(shared_words((2 * kDbiasDepth * kDbiasStride + 2 * kDbiasTile) * 4)) {}

  TILEWISE_DEVICE static State& state() {
    return *reinterpret_cast<State*>(ptx::shared_memory() + kDbiasSharedBytes - kDbiasStateBytes);
  }

  // Pointers to the rows of an operand that this thread loads; null: a row of zeros.
  struct Rows {
    const T* at[kLoads];
  };

  // A lane reads column lane % 8 of row lane / 8, so a warp's stores hit every bank once.
  TILEWISE_DEVICE static int load_row(int load) {
    return ptx::warp_index() * 8 + load * 4 + ptx::lane_index() / 8;
  }

  TILEWISE_DEVICE static Rows query_rows_of(const tilewise_tensor& view, const Sequence& s,
                                            int64_t head, Range rows) {
    Rows r;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t row = rows.begin + load_row(i);
      r.at[i] = row < rows.end ? static_cast<const T*>(view.data) + s.row_offset(view, row) +
                                     head * view.stride_head
                               : nullptr;
    }
    return r;
  }
  TILEWISE_DEVICE static Rows key_rows_of(const tilewise_tensor& view, const Sequence& s,
                                          int64_t kv_head, Range keys) {
    Rows r;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t key = keys.begin + load_row(i);
      r.at[i] = key < keys.end ? static_cast<const T*>(view.data) + s.kv.offset(view, key) +
                                     kv_head * view.stride_head
                               : nullptr;
    }
    return r;
  }

  TILEWISE_DEVICE static void load(SharedWords to, const Rows& rows, int first, int columns) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kDbiasDepth; j += 8) {
        const int column = j + ptx::lane_index() % 8;
        float x = 0.0f;
        if (rows.at[i] != nullptr && first + column < columns)
          x = to_float(rows.at[i][first + column]);
        to.set(column * kDbiasStride + load_row(i), ptx::bits_of(x));
      }
    }
  }

  TILEWISE_DEVICE static void load_four(float (&x)[kMicro], SharedWords from, int column,
                                        int first) {
    uint32_t words[kMicro];
    ptx::ld_shared_v4_b32(words,
                          from.base + static_cast<uint32_t>(column * kDbiasStride + first) * 4);
#pragma unroll
    for (int i = 0; i < kMicro; ++i) x[i] = ptx::float_of(words[i]);
  }

  // Adds the products of rows and keys over all columns: a sum of each kDbiasDepth columns, then
  // the sum of these, which rounds less than one chain of additions.
  TILEWISE_DEVICE void product(Micro& sum, const Rows& rows, const Rows& keys, int columns) const {
    const int row = ptx::thread_index() / kSide * kMicro;
    const int key = ptx::thread_index() % kSide * kMicro;
    for (int first = 0; first < columns; first += kDbiasDepth) {
      ptx::sync_block();
      load(a, rows, first, columns);
      load(b, keys, first, columns);
      ptx::sync_block();
      Micro chain = {};
#pragma unroll 4
      for (int column = 0; column < kDbiasDepth; ++column) {
        float x[kMicro], y[kMicro];
        load_four(x, a, column, row);
        load_four(y, b, column, key);
#pragma unroll
        for (int i = 0; i < kMicro; ++i)
#pragma unroll
          for (int j = 0; j < kMicro; ++j) chain[i][j] = ptx::fma(x[i], y[j], chain[i][j]);
      }
#pragma unroll
      for (int i = 0; i < kMicro; ++i)
#pragma unroll
        for (int j = 0; j < kMicro; ++j) sum[i][j] += chain[i][j];
    }
  }

  // Stores lse and delta = do.o - dlse of the tile's rows; valid for other threads after the next
  // barrier.
  TILEWISE_DEVICE void statistics(const Sequence& s, int64_t head, Range rows) const {
    constexpr int kRows = kDbiasTile * ptx::kWarpSize / kDbiasThreads;
    for (int i = 0; i < kRows; ++i) {
      const int at = ptx::warp_index() * kRows + i;
      const int64_t row = rows.begin + at;
      float row_lse = 0.0f;
      float row_delta = 0.0f;
      float row_lse_low = 0.0f;
      if (row < rows.end) {
        const T* const dout = static_cast<const T*>(g.dout.data) + s.row_offset(g.dout, row) +
                              head * g.dout.stride_head;
        row_delta =
            with_out<T>(p, s.row_offset(p.out, row) + head * p.out.stride_head,
                        [&](const auto* out) { return dot_of_warp(out, dout, p.head_dim_v); });
        if (g.dlse != nullptr)
          row_delta -= g.dlse[s.lse_offset(g.dlse_stride_batch, row) + head * g.dlse_stride_head];
        const int64_t at_row = s.lse_offset(p.lse_stride_batch, row) + head * p.lse_stride_head;
        row_lse = p.lse[at_row];
        if (p.lse_low != nullptr) row_lse_low = p.lse_low[at_row];
      }
      if (ptx::lane_index() != 0) continue;
      lse.set(at, ptx::bits_of(row_lse == kMinusInfinity ? 0.0f : row_lse));
      delta.set(at, ptx::bits_of(row_delta));
      lse_low.set(at, ptx::bits_of(row_lse_low));
    }
  }

  // Adds ds of one head to the thread's sums.
  TILEWISE_DEVICE void add(Micro& sum, int32_t head, int32_t row_tile, int32_t key_tile) const {
    const Sequence& s = state().sequence;
    const auto kv_head = static_cast<int32_t>(head / group_size(p));
    const auto rows = [&] { return Tiling{s.band.rows, kDbiasTile}.at(row_tile); };
    const auto keys = [&] { return Tiling{s.band.keys, kDbiasTile}.at(key_tile); };
    ptx::sync_block();  // lse and delta of the previous head have been read
    statistics(s, head, rows());
    state().mask.load_bits(
        Coverage::partial, keys().begin, [&](int r) { return rows().begin + r; },
        [&](int) { return head; });
    Micro score = {};
    product(score, query_rows_of(p.q, s, head, rows()), key_rows_of(p.k, s, kv_head, keys()),
            static_cast<int>(p.head_dim));
    Micro dp = {};
    product(dp, query_rows_of(g.dout, s, head, rows()), key_rows_of(p.v, s, kv_head, keys()),
            static_cast<int>(p.head_dim_v));
    const int first_row = ptx::thread_index() / kSide * kMicro;
    const int64_t first_key = int64_t{key_tile} * kDbiasTile + ptx::thread_index() % kSide * kMicro;
    // Row 0 of the arrays is used, then their rows rotate: so there is one copy of the code, and no
    // register is selected by an index at run time.
#pragma unroll 1
    for (int i = 0; i < kMicro; ++i) {
      add_row(sum[0], score[0], dp[0], head, row_tile, first_row + i, first_key);
      rotate(sum);
      rotate(score);
      rotate(dp);
    }
  }

  TILEWISE_DEVICE static void rotate(Micro& x) {
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      const float first = x[0][j];
#pragma unroll
      for (int i = 1; i < kMicro; ++i) x[i - 1][j] = x[i][j];
      x[kMicro - 1][j] = first;
    }
  }

  // Adds ds of row `at` of the tile, for four keys.
  TILEWISE_DEVICE void add_row(float (&sum)[kMicro], const float (&score)[kMicro],
                               const float (&dp)[kMicro], int32_t head, int32_t row_tile, int at,
                               int64_t first_key) const {
    const Sequence& s = state().sequence;
    const int64_t row = int64_t{row_tile} * kDbiasTile + at;
    if (row >= s.band.rows) return;
    const Range seen = s.band.keys_of(row);
    const auto begin = static_cast<int>(clamp(seen.begin - first_key, 0, kMicro));
    const auto end = static_cast<int>(clamp(seen.end - first_key, 0, kMicro));
    const ScoreMod& score_mod = state().score_mod;
    const RowScoreMod row_score_mod = ScoreMod::row(p, s, row, head);
    const float row_lse = ptx::float_of(lse.get(at));
    const float row_delta = ptx::float_of(delta.get(at));
    const float row_lse_low = ptx::float_of(lse_low.get(at));
    const uint32_t shown = state().mask.four_keys(at, ptx::thread_index() % kSide);
    KeepFactors keep{};
    if (score_mod.dropout.on()) keep = score_mod.keep(row_score_mod, first_key);
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      if (j < begin || j >= end || (shown >> j & 1u) == 0) continue;
      const float exponent =
          (score_mod.at(score[j], row_score_mod, first_key + j).value - row_lse) - row_lse_low;
      // lse is rounded, so a weight could exceed 1 by that rounding: clamp it.
      const float weight = exponential(exponent > 0.0f ? 0.0f : exponent);
      const float factor = score_mod.dropout.on() ? keep.at(first_key + j) : 1.0f;
      sum[j] += weight * (dp[j] * factor - row_delta);
    }
  }

  TILEWISE_DEVICE static void list_ranges(Range rows, Range keys) {
    if (!state().mask.on()) return;
    ptx::sync_block();  // the bits of the previous tile have been computed
    if (ptx::warp_index() == 0) state().mask.list(rows, keys);
    ptx::sync_block();
  }
  TILEWISE_DEVICE static bool shows_some(int32_t head, Range rows, Range keys) {
    return !state().mask.on() ||
           state().mask.coverage_of({head, head + 1}, rows, keys) != Coverage::none;
  }

  TILEWISE_DEVICE void run(int64_t block) const {
    const DbiasTile tile = DbiasTile::of(p, g, block);
    Micro sum = {};
    const auto begin = [&](int32_t batch) -> const Band& {
      ptx::sync_block();  // all threads have read the state of the previous sequence
      if (ptx::thread_index() == 0) {
        state().sequence = sequence_of(p, batch);
        state().score_mod = ScoreMod::of(p);
        state().mask.begin(mask, batch);
      }
      ptx::sync_block();
      return state().sequence.band;
    };
    const auto begin_rows = [&](Range rows) { list_ranges(rows, tile.keys(g)); };
    tile.for_each_part(p, g, begin, begin_rows, [&](int32_t head, int32_t row_tile) {
      const Range rows = Tiling{state().sequence.band.rows, kDbiasTile}.at(row_tile);
      if (shows_some(head, rows, tile.keys(g))) add(sum, head, row_tile, tile.key_tile);
    });
    DbiasTile::of(p, g, block).write(sum, g, a);
  }
};

template <class Element>
TILEWISE_KERNEL(kDbiasThreads, 2)
void dbias(TILEWISE_PARAMETER DbiasParams params) {
  const Dbias<Element> dbias(params);
  dbias.run(ptx::block_index());
}

}  // namespace tilewise::cuda::common
