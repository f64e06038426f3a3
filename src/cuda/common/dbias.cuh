// The gradient of bias: see dbias.h. The arithmetic is fp32 for every element type.
#pragma once

#include "attention/online_softmax.h"
#include "attention/schedule.h"
#include "cuda/common/block.h"
#include "cuda/common/dbias.h"
#include "cuda/common/score_terms.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// A block of 16 x 16 threads, each with 4 rows and 4 keys of the tile.
template <class Element>
struct Dbias {
  using T = typename Element::Storage;
  static constexpr int kMicro = 4;
  static constexpr int kSide = kDbiasTile / kMicro;
  static constexpr int kLoads = 2;  // rows of a tile that a thread reads, 4 times 8 columns apart
  using Micro = float[kMicro][kMicro];

  const Problem& p;
  const Gradients& g;
  ScoreTerms terms;
  SharedWords a;  // [column][row]
  SharedWords b;  // [column][key]
  SharedWords lse;
  SharedWords delta;

  TILEWISE_DEVICE explicit Dbias(const DbiasParams& params)
      : p(params.problem),
        g(params.gradients),
        terms(ScoreTerms::of(params.problem)),
        a(shared_words(0)),
        b(shared_words(kDbiasDepth * kDbiasPitch * 4)),
        lse(shared_words(2 * kDbiasDepth * kDbiasPitch * 4)),
        delta(shared_words((2 * kDbiasDepth * kDbiasPitch + kDbiasTile) * 4)) {}

  // Where this thread's rows of an operand begin; null: a row of zeros.
  struct Rows {
    const T* at[kLoads];
  };

  // A lane reads column lane % 8 of row lane / 8, so a warp's stores meet every bank once.
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
        to.set(column * kDbiasPitch + load_row(i), ptx::bits_of(x));
      }
    }
  }

  TILEWISE_DEVICE static void load_four(float (&x)[kMicro], SharedWords from, int column,
                                        int first) {
    uint32_t words[kMicro];
    ptx::ld_shared_v4_b32(words,
                          from.base + static_cast<uint32_t>(column * kDbiasPitch + first) * 4);
#pragma unroll
    for (int i = 0; i < kMicro; ++i) x[i] = ptx::float_of(words[i]);
  }

  // Products of rows and keys over all columns: sums of kDbiasDepth, then their sum, which rounds
  // less than one chain.
  TILEWISE_DEVICE void product(Micro& sum, const Rows& rows, const Rows& keys, int columns) const {
    const int row = ptx::thread_index() / kSide * kMicro;
    const int key = ptx::thread_index() % kSide * kMicro;
    for (int first = 0; first < columns; first += kDbiasDepth) {
      ptx::sync_block();
      load(a, rows, first, columns);
      load(b, keys, first, columns);
      ptx::sync_block();
      Micro part = {};
#pragma unroll 4
      for (int column = 0; column < kDbiasDepth; ++column) {
        float x[kMicro], y[kMicro];
        load_four(x, a, column, row);
        load_four(y, b, column, key);
#pragma unroll
        for (int i = 0; i < kMicro; ++i)
#pragma unroll
          for (int j = 0; j < kMicro; ++j) part[i][j] = ptx::fma(x[i], y[j], part[i][j]);
      }
#pragma unroll
      for (int i = 0; i < kMicro; ++i)
#pragma unroll
        for (int j = 0; j < kMicro; ++j) sum[i][j] += part[i][j];
    }
  }

  // lse and do.o - dlse of the tile's rows; seen by the others after the next barrier.
  TILEWISE_DEVICE void statistics(const Sequence& s, int64_t head, Range rows) const {
    constexpr int kRows = kDbiasTile * ptx::kWarpSize / kDbiasThreads;
    for (int i = 0; i < kRows; ++i) {
      const int at = ptx::warp_index() * kRows + i;
      const int64_t row = rows.begin + at;
      float row_lse = 0.0f;
      float row_delta = 0.0f;
      if (row < rows.end) {
        row_delta = dot_of_warp(
            static_cast<const T*>(p.out.data) + s.row_offset(p.out, row) + head * p.out.stride_head,
            static_cast<const T*>(g.dout.data) + s.row_offset(g.dout, row) +
                head * g.dout.stride_head,
            p.head_dim_v);
        if (g.dlse != nullptr)
          row_delta -= g.dlse[s.lse_offset(g.dlse_stride_batch, row) + head * g.dlse_stride_head];
        row_lse = p.lse[s.lse_offset(p.lse_stride_batch, row) + head * p.lse_stride_head];
      }
      if (ptx::lane_index() != 0) continue;
      lse.set(at, ptx::bits_of(row_lse == kMinusInfinity ? 0.0f : row_lse));
      delta.set(at, ptx::bits_of(row_delta));
    }
  }

  // Adds ds of one head to the thread's sums.
  TILEWISE_DEVICE void add(Micro& sum, const Sequence& s, int64_t head, Range rows,
                           Range keys) const {
    const int64_t kv_head = head / group_size(p);
    const Range used = intersect(keys, {0, s.band.keys});
    ptx::sync_block();  // the head before has read lse and delta
    statistics(s, head, rows);
    Micro score = {};
    product(score, query_rows_of(p.q, s, head, rows), key_rows_of(p.k, s, kv_head, used),
            static_cast<int>(p.head_dim));
    Micro dp = {};
    product(dp, query_rows_of(g.dout, s, head, rows), key_rows_of(p.v, s, kv_head, used),
            static_cast<int>(p.head_dim_v));
    const int first_row = ptx::thread_index() / kSide * kMicro;
    const int64_t first_key = keys.begin + ptx::thread_index() % kSide * kMicro;
#pragma unroll
    for (int i = 0; i < kMicro; ++i) {
      const int64_t row = rows.begin + first_row + i;
      if (row >= rows.end) continue;
      const Range seen = s.band.keys_of(row);
      const RowTerms row_terms = ScoreTerms::row(p, s, row, head);
      const float row_lse = ptx::float_of(lse.get(first_row + i));
      const float row_delta = ptx::float_of(delta.get(first_row + i));
      KeepFactors keep{};
      if (terms.dropout.on()) keep = terms.keep(row_terms, first_key);
#pragma unroll
      for (int j = 0; j < kMicro; ++j) {
        if (!seen.contains(first_key + j)) continue;
        const float exponent = terms.at(score[i][j], row_terms, first_key + j).value - row_lse;
        // lse is rounded: a weight may come out above 1 by that rounding, never by more.
        const float weight = exponential(exponent > 0.0f ? 0.0f : exponent);
        const float factor =
            terms.dropout.on() ? keep.at(static_cast<int>((first_key + j) % 8)) : 1.0f;
        sum[i][j] += weight * (dp[i][j] * factor - row_delta);
      }
    }
  }

  // Which part of dbias the block owns; kAll where it sums.
  struct Tile {
    int64_t batch;
    int64_t head;
    int64_t row_tile;
    Range keys;
  };
  static constexpr int64_t kAll = -1;

  TILEWISE_DEVICE Tile tile_of(int64_t block) const {
    const DbiasShape shape = DbiasShape::of(p, g);
    const int64_t key_tile = block % shape.key_tiles();
    block /= shape.key_tiles();
    const int64_t row_tile = block % shape.row_tiles();
    block /= shape.row_tiles();
    return {g.dbias_stride_batch == 0 ? kAll : block / shape.heads,
            g.dbias_stride_head == 0 ? kAll : block % shape.heads,
            g.dbias_stride_row == 0 ? kAll : row_tile, Tiling{shape.keys, kDbiasTile}.at(key_tile)};
  }

  // [begin, end) of `count`, or the one that the block owns.
  TILEWISE_DEVICE static Range walked(int64_t own, int64_t count) {
    return own == kAll ? Range{0, count} : Range{own, own + 1};
  }

  TILEWISE_DEVICE void run(int64_t block) const {
    const Tile tile = tile_of(block);
    Micro sum = {};
    const Range batches = walked(tile.batch, p.batch);
    for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
      const Sequence s = sequence_of(p, batch);
      const Tiling row_tiling{s.band.rows, kDbiasTile};
      const Range row_tiles = walked(tile.row_tile, row_tiling.count());
      for (int64_t i = row_tiles.begin; i < row_tiles.end; ++i) {
        const Range rows = row_tiling.at(i);
        if (rows.empty() || intersect(s.band.keys_of_any(rows), tile.keys).empty()) continue;
        const Range heads = walked(tile.head, p.heads_q);
        for (int64_t head = heads.begin; head < heads.end; ++head)
          add(sum, s, head, rows, tile.keys);
      }
    }
    write(sum, tile);
  }

  TILEWISE_DEVICE void write(const Micro& sum, const Tile& tile) const {
    float* const out = g.dbias + max(int64_t{0}, tile.batch) * g.dbias_stride_batch +
                       max(int64_t{0}, tile.head) * g.dbias_stride_head;
    const int row_group = ptx::thread_index() / kSide;
    const int key_group = ptx::thread_index() % kSide;
    if (tile.row_tile == kAll) return write_sum_of_rows(sum, out, tile.keys);
    const int64_t first_row = tile.row_tile * kDbiasTile + row_group * kMicro;
    const int64_t first_key = tile.keys.begin + key_group * kMicro;
#pragma unroll
    for (int i = 0; i < kMicro; ++i)
#pragma unroll
      for (int j = 0; j < kMicro; ++j)
        if (first_row + i < g.dbias_rows && first_key + j < tile.keys.end)
          out[(first_row + i) * g.dbias_stride_row + first_key + j] = sum[i][j];
  }

  TILEWISE_DEVICE void write_sum_of_rows(const Micro& sum, float* out, Range keys) const {
    const int row_group = ptx::thread_index() / kSide;
    const int key_group = ptx::thread_index() % kSide;
    ptx::sync_block();
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      float of_thread = 0.0f;
#pragma unroll
      for (int i = 0; i < kMicro; ++i) of_thread += sum[i][j];
      a.set(row_group * kDbiasPitch + key_group * kMicro + j, ptx::bits_of(of_thread));
    }
    ptx::sync_block();
    const int key = ptx::thread_index();
    if (key >= keys.size()) return;
    float total = 0.0f;
    for (int i = 0; i < kSide; ++i) total += ptx::float_of(a.get(i * kDbiasPitch + key));
    out[keys.begin + key] = total;
  }
};

template <class Element>
TILEWISE_KERNEL(kDbiasThreads, 1)
void dbias(TILEWISE_PARAMETER DbiasParams params) {
  const Dbias<Element> dbias(params);
  dbias.run(ptx::block_index());
}

}  // namespace tilewise::cuda::common
