// The products of decoding with vectors along the head dimension: rows of K times q, and sums of
// rows of V weighted by p, both read in place.
#pragma once

#include "cpu/generic/decode_units.h"
#include "cpu/generic/tasks.h"

namespace tilewise::cpu {
namespace {

template <class T>
struct DotProducts {
  using Reader = Stream<T>;
  using Read = typename Reader::Read;
  using ReadOrderPrefetcher = typename DecodePrefetch<T>::ReadOrderPrefetcher;
  template <int R>
  using MemoryOrderPrefetcher = typename DecodePrefetch<T>::template MemoryOrderPrefetcher<(R > 1)>;
  struct Session {
    TILEWISE_FN explicit Session(int64_t) {}
  };
  static constexpr int kStep = W;             // keys of a tile are padded to a multiple of it
  static constexpr int kMaxRows = min(8, W);  // per head
  static constexpr int kRows = kMaxRows;      // per product
  static constexpr int kParts = Reader::kParts;
  static constexpr int kColumns = Reader::kColumns;
  // Accumulators kept in registers: half of the registers, as the other half holds operands.
  static constexpr int kSums = kRegisters / 2;
  // Rows whose sums with V are kept in registers. With 16 registers, half of the sums of 8 rows
  // would spill.
  static constexpr int kRowsOfValues = kRegisters / 4;
  // Reads of V whose sums for `rows` rows fit into the registers.
  TILEWISE_FN static constexpr int reads_at_once(int rows) {
    return max(1, min(8, kSums / rows) / kParts);
  }
  // The number of keys whose weighted values a row sums in registers before it adds the sums to o.
  // For one row this is a whole tile (Zen 5, bf16 D128, one thread: 32 GB/s, 29 with eight keys) if
  // a row of V fits into the registers and the next keys belong to the same head; otherwise it is
  // eight. Several rows have more sums to add: 16 keys take 5 to 11 % less time in cache than 8,
  // and more gain nothing.
  TILEWISE_FN static int64_t group_of(const Problem& p, int64_t rows) {
    if (rows > 1) return 16;
    const bool one_run = !heads_side_by_side(p) && p.head_dim_v <= reads_at_once(1) * kColumns;
    return one_run ? DecodePrefetch<T>::kMaxKeys : 8;
  }
  static constexpr int64_t kMaxPrefetchDistance = DecodePrefetch<T>::kMaxKeys;

  // Whether R rows use UnitScores. With few rows memory is the limit, and keys are read one by one:
  // with UnitScores (Zen 5, one thread) one and two rows take up to 10 % longer, four take the same
  // time, and eight reach 1.26 to 1.38 times the speed.
  template <int R>
  static constexpr bool kByUnits = Reader::kHasUnits && R >= 4 * Reader::kUnitBlocks;

  // How to prefetch (DecodePrefetch). One row, and heads side by side, prefetch in the tensor that
  // is being read; several rows of one head prefetch the other tensor (`prefetch_across`). The
  // distances are counts of keys; so many rows are listed after those of a tile.
  const bool prefetch_across;
  const bool in_order_of_memory;
  const bool into_l1;
  const int64_t prefetch_distance_k;
  const int64_t prefetch_distance_v;

  TILEWISE_FN explicit DotProducts(const ForwardTask& task)
      : DotProducts(task, task.packed_rows.size() > 1 && task.heads == 1) {}
  TILEWISE_FN DotProducts(const ForwardTask& task, bool across)
      : prefetch_across(across),
        in_order_of_memory(DecodePrefetch<T>::in_order_of_memory(task)),
        into_l1(DecodePrefetch<T>::into_l1(task)),
        prefetch_distance_k(across ? kMaxPrefetchDistance
                                   : prefetch_distance(task, task.problem->head_dim)),
        prefetch_distance_v(across ? DecodePrefetch<T>::kNearKeys
                                   : prefetch_distance(task, task.problem->head_dim_v)) {}
  TILEWISE_FN static int64_t prefetch_distance(const ForwardTask& task, int64_t columns) {
    return DecodePrefetch<T>::distance(task, columns,
                                       group_of(*task.problem, task.packed_rows.size()));
  }

  // The rows to prefetch while the first key, or the first value, of a tile is read.
  template <class Item>
  TILEWISE_FN const T* const* prefetch_rows_with_keys(const Item& d) const {
    return prefetch_across ? d.values_of_tile : d.keys_of_tile + prefetch_distance_k;
  }
  template <class Item>
  TILEWISE_FN const T* const* prefetch_rows_with_values(const Item& d) const {
    return prefetch_across ? d.keys_of_tile + d.padded : d.values_of_tile + prefetch_distance_v;
  }

  // Layout of q: [row][read], or that of UnitScores
  template <class Item>
  TILEWISE_FN static void place_q(const Item& d, const Read& part, int64_t h, int64_t lane,
                                  int64_t c) {
    d.with_rows([&](auto R) {
      Read* const q = reinterpret_cast<Read*>(d.q) + h * R * d.reads_of_q();
      if constexpr (kByUnits<R>)
        UnitScores<T, R>::place(q, part, lane, c);
      else
        q[lane * d.reads_of_q() + c] = part;
    });
  }

  // Columns to prefetch per row if heads lie side by side: as much as the reads of `columns` of
  // each head cover. If a head does not end with a cache line, that includes a little of what
  // follows the last head.
  template <class Item>
  TILEWISE_FN static int64_t prefetch_columns_of_heads(const Item& d, int64_t columns) {
    return d.task.heads * round_up(columns, DecodePrefetch<T>::kLineColumns);
  }

  // Calls body with the type of the prefetcher.
  template <int R, class Body>
  TILEWISE_FN void with_prefetcher(const Body& body) const {
    if constexpr (R == 1) {
      if (!in_order_of_memory) return body(std::type_identity<ReadOrderPrefetcher>{});
    }
    body(std::type_identity<MemoryOrderPrefetcher<R>>{});
  }

  // q . k of R rows and N keys, each key line by line in memory order. The sum over lanes is left
  // to the caller.
  template <int R, int N, class Item, class Prefetcher>
  TILEWISE_FN void dots(const Item& d, const Read* query, const T* const* k, Prefetcher& prefetcher,
                        int64_t offset, int first, F (&sums)[R][4]) const {
    F sum[R][N] = {};
    const auto add = [&](int64_t c, const Read(&key)[N]) {
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
          sum[r][n] = Reader::dot(sum[r][n], query[r * d.reads_of_q() + c], key[n]);
    };
    const int64_t whole = d.p.head_dim / kColumns;
    Read key[N];
    for (int64_t c = 0; c < whole; ++c) {
      const int64_t at = offset + c * kColumns;
      for (int n = 0; n < N; ++n) {
        prefetcher.template prefetch_on_read<kColumns>(k + n, offset, c * kColumns);
        key[n] = Reader::read(k[n] + at);
      }
      add(c, key);
    }
    if (whole != d.reads_of_q()) {
      for (int n = 0; n < N; ++n) key[n] = d.read(k[n] + offset, whole * kColumns, d.p.head_dim);
      add(whole, key);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][first + n] = sum[r][n];
  }

  template <int R, class Item>
  __attribute__((noinline)) void scores(const Item& d) const {
    if constexpr (kByUnits<R>)
      scores_by_units<R>(d);
    else
      with_prefetcher<R>(
          [&](auto prefetcher) { scores_by_dots<R, typename decltype(prefetcher)::type>(d); });
  }

  template <int R, class Item>
  TILEWISE_FN void scores_by_units(const Item& d) const {
    using Units = UnitScores<T, R>;
    const Read* const q = reinterpret_cast<const Read*>(d.q);
    const T* const* const upcoming = prefetch_rows_with_keys(d);
    const int64_t prefetch_columns =
        prefetch_columns_of_heads(d, Units::prefetch_columns(d.p.head_dim));
    for (int64_t first = 0; first < d.padded; first += W) {
      MemoryOrderPrefetcher<R> prefetcher{upcoming + first, prefetch_columns, prefetch_distance_k,
                                          into_l1};
      for (int64_t h = 0; h < d.task.heads; ++h) {
        F sums[Units::kBlocks][W];
        F rows[Units::kBlocks][Units::kRows];
        const Read* const query = q + h * R * d.reads_of_q();
        Units::dots(sums, reinterpret_cast<const typename Reader::Unit*>(query),
                    d.keys_of_tile + first, prefetcher, h * d.p.k.stride_head, d.p.head_dim);
        for (int b = 0; b < Units::kBlocks; ++b) Units::by_rows(rows[b], sums[b]);
        for (int r = 0; r < R; ++r)
          store(d.s_of(h * R + r) + first,
                rows[r / Units::kRows][r % Units::kRows] * d.unit_of_k(h));
      }
    }
  }

  template <int R, class Prefetcher, class Item>
  TILEWISE_FN void scores_by_dots(const Item& d) const {
    // One row does little besides reading, except for float8, which needs a conversion.
    constexpr int N = R == 1 && sizeof(T) > 1 ? 1 : min(4, kSums / R);
    const Read* const query = reinterpret_cast<const Read*>(d.q);
    const T* const* const upcoming = prefetch_rows_with_keys(d);
    const int64_t prefetch_columns =
        prefetch_columns_of_heads(d, d.p.head_dim / kColumns * kColumns);
    for (int64_t first = 0; first < d.padded; first += W) {
      F sums[kDecodeRows][W / 4];  // lane i: of key i % 4
      for (int four = 0; four < W / 4; ++four) {
        const int64_t key = first + 4 * four;
        Prefetcher prefetcher{upcoming + key, prefetch_columns, prefetch_distance_k, into_l1};
        for (int64_t h = 0; h < d.task.heads; ++h) {
          const int64_t offset = h * d.p.k.stride_head;
          F sum[R][4];
          for (int n = 0; n < 4; n += N)
            dots<R, N>(d, query + h * R * d.reads_of_q(), d.keys_of_tile + key + n, prefetcher,
                       offset, n, sum);
          for (int r = 0; r < R; ++r) sums[h * R + r][four] = sum_of_rows<1>(sum[r]);
        }
      }
      for (int64_t row = 0; row < d.task.heads * R; ++row)
        store(d.s_of(row) + first, sum_of_rows<4>(sums[row]) * d.unit_of_k(row / R));
    }
  }

  // o of B rows += p v for `kKeys` keys (all keys whose weights are applied at once, or a single
  // one): V reads of columns from `c` on. `first` is set for one block of rows per head, which also
  // prefetches.
  template <int B, int V, bool kWhole, int kKeys, class Item, class Prefetcher>
  TILEWISE_FN void weigh(const Item& d, Prefetcher& prefetcher, int64_t offset, int64_t c,
                         bool first, const float* weights, int64_t key,
                         F (&sum)[B][V][kParts]) const {
    const T* const* const v = d.values_of_tile + key;
    const int64_t columns = d.p.head_dim_v;
    typename Reader::Values values[V];
    for (int j = 0; j < V; ++j) {
      const int64_t column = c + j * kColumns;
      Read read[Reader::kKeys] = {};
      for (int i = 0; i < kKeys; ++i) {
        if (first) prefetcher.template prefetch_on_read<kColumns>(v + i, offset, column);
        if constexpr (kWhole)
          read[i] = Reader::read(v[i] + offset + column);
        else
          read[i] = d.read(v[i] + offset, min(columns, column), columns);
      }
      values[j] = Reader::values(read);
    }
    for (int r = 0; r < B; ++r)
      for (int j = 0; j < V; ++j) Reader::weigh(sum[r][j], values[j], weights + r * d.tile_k, key);
  }

  // The B rows from `row` on of head h.
  template <int R, int B, int V, bool kWhole, class Item, class Prefetcher>
  TILEWISE_FN void accumulate_group(const Item& d, Prefetcher& prefetcher, Range keys, int64_t h,
                                    int64_t row, int64_t c) const {
    constexpr int K = Reader::kKeys;
    const int64_t offset = h * d.p.v.stride_head;
    const float* const weights = d.s_of(h * R + row);
    F sum[B][V][kParts] = {};
    int64_t key = keys.begin;
    for (; key + K <= keys.end; key += K)
      weigh<B, V, kWhole, K>(d, prefetcher, offset, c, row == 0, weights, key, sum);
    if (key < keys.end)
      weigh<B, V, kWhole, 1>(d, prefetcher, offset, c, row == 0, weights, key, sum);
    for (int r = 0; r < B; ++r)
      for (int j = 0; j < V; ++j) d.add_to_o(h * R + row + r, c + j * kColumns, sum[r][j]);
  }

  template <int R, class Item>
  __attribute__((noinline)) void accumulate(const Item& d) const {
    with_prefetcher<R>(
        [&](auto prefetcher) { accumulate_by<R, typename decltype(prefetcher)::type>(d); });
  }

  template <int R, class Prefetcher, class Item>
  TILEWISE_FN void accumulate_by(const Item& d) const {
    constexpr int B = min(R, kRowsOfValues);
    constexpr int V = reads_at_once(B);
    constexpr int kHalf = max(1, V / 2);
    const int64_t group = group_of(d.p, R);
    const int64_t columns = d.p.head_dim_v;
    const int64_t prefetch_columns =
        prefetch_columns_of_heads(d, round_up(columns, kHalf * kColumns));
    for (int64_t first = 0; first < d.count; first += group) {
      const Range keys = {first, min(d.count, first + group)};
      Prefetcher prefetcher{prefetch_rows_with_values(d) + first, prefetch_columns,
                            prefetch_distance_v, into_l1};
      for (int64_t h = 0; h < d.task.heads; ++h)
        for (int64_t row = 0; row < R; row += B) {
          int64_t c = 0;
          for (; c + V * kColumns <= columns; c += V * kColumns)
            accumulate_group<R, B, V, true>(d, prefetcher, keys, h, row, c);
          for (; c + kHalf * kColumns <= columns; c += kHalf * kColumns)
            accumulate_group<R, B, kHalf, true>(d, prefetcher, keys, h, row, c);
          for (; c < columns; c += kHalf * kColumns)
            accumulate_group<R, B, kHalf, false>(d, prefetcher, keys, h, row, c);
        }
    }
  }
};

}  // namespace
}  // namespace tilewise::cpu
