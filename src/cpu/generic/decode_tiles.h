// The products of decoding with the AMX tile unit, for bf16. A product takes nearly as long for one
// row of q as for sixteen. Rows of K are loaded from the cache as rows of a tile; rows of V are
// interleaved in pairs before they are loaded into a tile. The rows of a head fill one tile or two.
#pragma once

#include "cpu/generic/amx_gemm.h"
#include "cpu/generic/decode_dots.h"
#include "cpu/generic/row_prefetch.h"

namespace tilewise::cpu {
namespace {

// Tile 0: s of 16 keys and R rows; 1: K; 2: q; 3: p of R rows and 32 keys; 4-5: o of R rows; 6-7:
// V.
constexpr TileConfig decode_config(int rows) {
  TileConfig config{};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    const bool rows_are_lanes = tile == 0 || tile == 2;
    const bool rows_are_rows = 3 <= tile && tile <= 5;
    config.row_bytes[tile] = static_cast<uint16_t>(4 * (rows_are_lanes ? rows : kTile));
    config.rows[tile] = static_cast<uint8_t>(rows_are_rows ? rows : kTile);
  }
  return config;
}
inline constexpr TileConfig kDecodeConfigs[] = {
    decode_config(1), decode_config(2), decode_config(4), decode_config(8), decode_config(16)};

struct TileProducts : DotProducts<BFloat16> {
  using T = BFloat16;
  static constexpr int kUnits = kTile;      // per read: pairs of columns
  static constexpr int kGroup = 2 * kTile;  // keys of one product with V
  static constexpr int kStep = kGroup;      // keys of a tile are padded to a multiple of it
  static constexpr int kMaxRows = 32;       // per head
  static constexpr int kRows = kTile;       // per product

  struct Session {
    TILEWISE_FN explicit Session(int64_t rows) {
      int config = 0;
      while (kDecodeConfigs[config].rows[3] < min<int64_t>(rows, kRows)) ++config;
      tile_configure(kDecodeConfigs[config]);
    }
    TILEWISE_FN ~Session() { tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  TILEWISE_FN explicit TileProducts(const ForwardTask& task) : DotProducts<BFloat16>(task, true) {}

  // Layout of q: [head][tile][read][unit][row of the tile]
  template <class Item>
  TILEWISE_FN static void place_q(const Item& d, Read part, int64_t h, int64_t lane, int64_t c) {
    const int64_t rows = min<int64_t>(kRows, d.rows_of_head);
    const int64_t tile = (h * d.rows_of_head + lane) / rows;
    uint32_t units[kUnits];
    store_as(units, part);
    uint32_t* const to = reinterpret_cast<uint32_t*>(d.q) +
                         (tile * d.reads_of_q() + c) * kUnits * rows + lane % rows;
    for (int i = 0; i < kUnits; ++i) to[i * rows] = units[i];
  }

  // 16 rows of K. If they are equally spaced they are read in place, except for the columns after
  // the last whole read.
  struct Keys {
    const T* const* rows;
    int64_t columns;
    int64_t step;   // bytes from one row to the next
    int64_t whole;  // columns that are read in place

    TILEWISE_FN Keys(const T* const* k, int64_t head_dim) : rows(k), columns(head_dim) {
      const intptr_t base = reinterpret_cast<intptr_t>(rows[0]);
      step = reinterpret_cast<intptr_t>(rows[1]) - base;
      intptr_t off = 0;
      for (int i = 2; i < kTile; ++i) off |= reinterpret_cast<intptr_t>(rows[i]) - base - i * step;
      whole = off == 0 ? columns / kColumns * kColumns : 0;
    }

    // Loads one read of each row into tile 1.
    template <class Item>
    TILEWISE_FN void load(int64_t offset, int64_t column) const {
      if (column < whole) return tile_load<1>(rows[0] + offset + column, step);
      alignas(64) Read copy[kTile];
      for (int i = 0; i < kTile; ++i) copy[i] = Item::read(rows[i] + offset, column, columns);
      tile_fence();
      tile_load<1>(copy, sizeof(Read));
      tile_fence();
    }
  };

  // [key][row] of 16 keys -> [row][key], by repeatedly separating even from odd rows.
  template <int R>
  TILEWISE_FN static void split_rows(const F* from, float* to, int64_t ld) {
    if constexpr (R == 1) {
      store(to, from[0]);
    } else {
      F even[R / 2], odd[R / 2];
      for (int i = 0; i < R / 2; ++i) {
        const F a = from[2 * i];
        const F b = from[2 * i + 1];
        even[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                          28, 30);
        odd[i] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                         29, 31);
      }
      split_rows<R / 2>(even, to, 2 * ld);
      split_rows<R / 2>(odd, to + ld, 2 * ld);
    }
  }

  // Lines are prefetched a few at a time: all lines of a tile at once would delay the loads of the
  // next product (D128: 39.2 instead of 35.9 ns per key).
  template <int R, class Item>
  __attribute__((noinline)) void scores(const Item& d) const {
    F sums[kDecodeRows];                                       // [head][tile][key][row]
    const int64_t tiles = R < kRows ? 1 : d.rows_of_head / R;  // per head
    LinePrefetcher<T> prefetcher(prefetch_rows_with_keys(d), d.padded, d.task.heads,
                                 d.p.v.stride_head, d.p.head_dim_v);
    for (int64_t first = 0; first < d.padded; first += kTile) {
      const Keys k(d.keys_of_tile + first, d.p.head_dim);
      const uint32_t* query = reinterpret_cast<const uint32_t*>(d.q);
      tile_fence();
      for (int64_t h = 0; h < d.task.heads; ++h)
        for (int64_t t = 0; t < tiles; ++t) {
          const int lines_per_read = t == 0 ? kTile / 2 : 0;
          tile_zero<0>();
          for (int64_t c = 0; c < k.columns; c += kColumns, query += kUnits * R) {
            prefetcher.prefetch(lines_per_read);
            k.load<Item>(h * d.p.k.stride_head, c);
            tile_load<2>(query, 4 * R);
            tile_dot_bf16<0, 1, 2>();
            prefetcher.prefetch(lines_per_read);
          }
          tile_store<0>(sums + (h * tiles + t) * R, 4 * R);
        }
      tile_fence();
      // A separate pass: a vector load has to wait until all stores of the tile it overlaps are
      // done.
      for (int64_t t = 0; t < d.task.heads * tiles; ++t)
        split_rows<R>(sums + t * R, d.s_of(t * R) + first, d.tile_k);
    }
  }

  // One read of each of 32 keys of a head: operand B of two tile products.
  struct Pairs {
    alignas(64) Read low[kTile];
    Read high[kTile];
  };

  // Keys past the last one read as zeros.
  template <class Item>
  TILEWISE_FN static void interleave(const Item& d, Pairs& to, int64_t first, int64_t h,
                                     int64_t column, LinePrefetcher<T>& prefetcher) {
    const T* const* const v = d.values_of_tile + first;
    const int64_t offset = h * d.p.v.stride_head;
    const auto put = [&](int i, Read a, Read b) {
      const Reader::Values values = Reader::values({a, b});
      to.low[i] = values.low;
      to.high[i] = values.high;
    };
    if (first + kGroup <= d.count && column + kColumns <= d.p.head_dim_v) {
      const int64_t at = offset + column;
      for (int i = 0; i < kTile; ++i) {
        put(i, Reader::read(v[2 * i] + at), Reader::read(v[2 * i + 1] + at));
        prefetcher.prefetch(2);
      }
      return;
    }
    prefetcher.prefetch(kGroup);
    const auto row_or_zeros = [&](int i) {
      return first + i < d.count ? Item::read(v[i] + offset, column, d.p.head_dim_v) : Read{};
    };
    for (int i = 0; i < kTile; ++i) put(i, row_or_zeros(2 * i), row_or_zeros(2 * i + 1));
  }

  template <int R, class Item>
  TILEWISE_FN static void multiply(const Item& d, const Pairs& v, int64_t first, int64_t h,
                                   int64_t column) {
    const int64_t rows = R < kRows ? R : d.rows_of_head;
    tile_load<6>(v.low, sizeof(Read));
    tile_load<7>(v.high, sizeof(Read));
    for (int64_t row = h * rows; row < (h + 1) * rows; row += R) {
      float* const o = d.o_of(row) + column;
      tile_load<3>(reinterpret_cast<const T*>(d.s_of(row)) + first, d.tile_k * 4);
      tile_load<4>(o, d.o_ld * 4);
      tile_load<5>(o + W, d.o_ld * 4);
      tile_dot_bf16<4, 3, 6>();
      tile_dot_bf16<5, 3, 7>();
      tile_store<4>(o, d.o_ld * 4);
      tile_store<5>(o + W, d.o_ld * 4);
    }
  }

  // Rows are interleaved one step before their product, because a tile load also waits for the
  // stores it overlaps (1.6 -> 0.9 ns per line in cache).
  template <int R, class Item>
  __attribute__((noinline)) void accumulate(const Item& d) const {
    struct Step {
      int64_t first, h, column;
    } last{};
    Pairs pairs[2];
    LinePrefetcher<T> prefetcher(prefetch_rows_with_values(d), kMaxPrefetchDistance, d.task.heads,
                                 d.p.k.stride_head, d.p.head_dim);
    int step_index = 0;
    for (int64_t first = 0; first < d.count; first += kGroup)
      for (int64_t h = 0; h < d.task.heads; ++h)
        for (int64_t column = 0; column < d.p.head_dim_v; column += kColumns, ++step_index) {
          interleave(d, pairs[step_index % 2], first, h, column, prefetcher);
          tile_fence();
          if (step_index > 0)
            multiply<R>(d, pairs[1 - step_index % 2], last.first, last.h, last.column);
          last = {first, h, column};
        }
    if (step_index > 0) multiply<R>(d, pairs[1 - step_index % 2], last.first, last.h, last.column);
    tile_fence();
  }
};

}  // namespace
}  // namespace tilewise::cpu
