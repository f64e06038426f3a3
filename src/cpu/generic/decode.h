// The forward of decoding: at most thin_rows packed rows of each of some key/value heads, over a
// range of keys. The time is that of reading K and V, so both are read once, in the order they lie
// in memory: all heads of a few keys after each other. Nothing is packed; the vectors run along the
// head dimension in the products and along keys in the softmax.
//
//   s[row][key] = q k^T
//   p           = 2^((s - m) c)   m and l kept per row
//   o[row]     += p v
#pragma once

#include "cpu/generic/score_tile.h"
#include "cpu/generic/softmax.h"
#include "cpu/generic/stream.h"

namespace tilewise::cpu {
namespace {

template <class T>
struct Decode : DecodeScratch {
  using Reader = Stream<T>;
  using Read = typename Reader::Read;
  static constexpr int kParts = Reader::kParts;
  static constexpr int kColumns = Reader::kColumns;
  // Sums that are kept in registers: half of them, the other half holds operands.
  static constexpr int kSums = W == 16 ? 16 : 8;
  static constexpr int kMostRows = min(8, W);  // of a head
  // Keys whose values a row adds up in registers. Short: another head comes after them.
  static constexpr int kGroup = 8;
  // The hardware does not follow rows that are some kilobytes apart: as many keys are asked for
  // ahead as fit in this, of a first-level cache of 32 KB or more.
  static constexpr int64_t kBytesAhead = 16 * 1024;
  static constexpr int64_t kMostAhead = 32;

  const ForwardTask& task;
  const Problem& p;
  const Sequence& s;
  Lanes lanes;  // rows of the first head
  const Score score;
  const Dropout dropout;
  const bool general;
  const float exponent;  // p = 2^((s - m) * exponent)
  Read* const q;         // [row][read]
  // Rows of the first head in the order they are read, each list padded to whole vectors: keys of
  // the tile, its values, keys of the next tile.
  const T** const rows;
  const int64_t ahead_k;
  const int64_t ahead_v;
  int64_t padded = 0;  // keys of the tile

  TILEWISE_FN Decode(const Shape& shape, const ForwardTask& t, Arena& arena)
      : DecodeScratch(shape, *t.problem, arena),
        task(t),
        p(*t.problem),
        s(t.sequence),
        lanes{DecodeScratch::lanes},
        score(score_of(p, s.batch, t.kv_head)),
        dropout(dropout_of(p)),
        general(is_general(p)),
        exponent(exponent_of(score, general)),
        q(reinterpret_cast<Read*>(DecodeScratch::q)),
        rows(reinterpret_cast<const T**>(DecodeScratch::rows)),
        ahead_k(keys_ahead(p.head_dim)),
        ahead_v(keys_ahead(p.head_dim_v)) {}

  TILEWISE_FN int64_t keys_ahead(int64_t columns) const {
    const int64_t bytes = task.heads * columns * static_cast<int64_t>(sizeof(T));
    return clamp(kBytesAhead / bytes, 4, kMostAhead);
  }

  TILEWISE_FN int64_t reads_of_q() const { return ceil_div(p.head_dim, kColumns); }
  TILEWISE_FN float* s_of(int64_t row) const { return s_tile + row * tile_k; }
  TILEWISE_FN float* o_of(int64_t row) const { return o + row * o_ld; }

  // Past the last column: zeros.
  TILEWISE_FN static Read read(const T* row, int64_t column, int64_t columns) {
    if (column + kColumns <= columns) return Reader::read(row + column);
    T buffer[kColumns] = {};
    for (int64_t i = column; i < columns; ++i) buffer[i - column] = row[i];
    return Reader::read(buffer);
  }

  // Calls body with a head's number of rows, rounded up, as a constant.
  template <class Body>
  TILEWISE_FN void with_rows(const Body& body) const {
    if (lanes.count <= 1) return body(std::integral_constant<int, 1>{});
    if (lanes.count <= 2) return body(std::integral_constant<int, 2>{});
    if (lanes.count <= 4) return body(std::integral_constant<int, 4>{});
    body(std::integral_constant<int, kMostRows>{});
  }

  // Calls body(row of the scratch, lane, kv head of the task) for every row there is.
  template <class Body>
  TILEWISE_FN void for_rows(const Body& body) const {
    with_rows([&](auto R) {
      for (int64_t h = 0; h < task.heads; ++h)
        for (int64_t lane = 0; lane < lanes.count; ++lane) body(h * R + lane, lane, h);
    });
  }
  TILEWISE_FN int64_t head_of(int64_t lane, int64_t h) const {
    return lanes.head[lane] + h * group_size(p);
  }

  TILEWISE_FN void begin() {
    lanes.fill(p, s, task.kv_head, task.packed_rows, W);
    const bool negate = !general && score.scale < 0.0f;
    const T* from[W];
    lane_rows(from, lanes, W, s, p.q);
    for (int64_t i = 0; i < kDecodeRows * reads_of_q(); ++i) q[i] = Read{};
    for_rows([&](int64_t row, int64_t lane, int64_t h) {
      const T* const q_row = from[lane] + h * group_size(p) * p.q.stride_head;
      for (int64_t c = 0; c < reads_of_q(); ++c) {
        Read& to = q[row * reads_of_q() + c];
        to = read(q_row, c * kColumns, p.head_dim);
        if (negate) Reader::negate(to);
      }
      const SoftmaxState state = first_state(task, head_of(lane, h), exponent);
      m[row] = state.m;
      F sum{};
      sum[0] = state.l;
      store(l + row * W, sum);
      for (int64_t c = 0; c < o_ld; c += W) store(o_of(row) + c, F{});
    });
  }

  // Rows of `keys` and, up to a whole vector and for what is prefetched behind them, again the
  // first one. Returns where the next list starts.
  TILEWISE_FN const T** list(const T** to, const WideScratch& wide, Range keys,
                             const tilewise_tensor& view, int64_t columns) const {
    keys_of(to, wide, keys, keys.size(), p, s, view, task.kv_head, columns);
    const T** const end = to + round_up(keys.size(), W);
    for (const T** at = to + keys.size(); at < end + kMostAhead; ++at) *at = rows[0];
    return end;
  }

  // q . k of R rows and N keys, one of them line by line as it lies in memory: sums over lanes are
  // still to be added up.
  template <int R, int N>
  TILEWISE_FN void dots(const Read* query, const T* const* k, int64_t offset, int first,
                        F (&sums)[R][4]) const {
    F sum[R][N] = {};
    const auto add = [&](int64_t c, const Read(&key)[N]) {
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
          sum[r][n] = Reader::dot(sum[r][n], query[r * reads_of_q() + c], key[n]);
    };
    const int64_t whole = p.head_dim / kColumns;
    Read key[N];
    for (int64_t c = 0; c < whole; ++c) {
      const int64_t at = offset + c * kColumns;
      for (int n = 0; n < N; ++n) {
        __builtin_prefetch(k[n + ahead_k] + at);
        key[n] = Reader::read(k[n] + at);
      }
      add(c, key);
    }
    if (whole != reads_of_q()) {
      for (int n = 0; n < N; ++n) key[n] = read(k[n] + offset, whole * kColumns, p.head_dim);
      add(whole, key);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][first + n] = sum[r][n];
  }

  template <int R>
  __attribute__((noinline)) void scores_of() const {
    constexpr int N = R == 1 ? 1 : min(4, kSums / R);
    for (int64_t first = 0; first < padded; first += W) {
      F sums[kDecodeRows][W / 4];  // lane i: of key i % 4
      for (int four = 0; four < W / 4; ++four)
        for (int64_t h = 0; h < task.heads; ++h) {
          const T* const* const k = rows + first + 4 * four;
          F sum[R][4];
          for (int n = 0; n < 4; n += N)
            dots<R, N>(q + h * R * reads_of_q(), k + n, h * p.k.stride_head, n, sum);
          for (int r = 0; r < R; ++r) sums[h * R + r][four] = sum_of_rows<1>(sum[r]);
        }
      for (int64_t row = 0; row < task.heads * R; ++row)
        store(s_of(row) + first, sum_of_rows<4>(sums[row]));
    }
  }

  // Score changes and band: W keys of a row from `key` of the sequence on, of which `count` exist.
  TILEWISE_FN F score_at(int64_t lane, int64_t head, int64_t key, int64_t count, F raw) const {
    F value = raw;
    if (general) {
      const auto diagonal = static_cast<int32_t>(lanes.row[lane] + s.band.shift() - key);
      const int64_t offset = bias_offset(p, s.batch, head, lanes.row[lane]) + key;
      const F bias = p.bias != nullptr ? bias_of_keys(p, offset, count) : F{};
      const F slope = splat(slope_of(p, s.batch, head));
      value = score.apply<VectorMath>(raw, slope, magnitude(diagonal - lane_numbers()), bias).value;
    }
    const auto begin = static_cast<int32_t>(clamp(lanes.begin[lane] - key, 0, W));
    const auto end = static_cast<int32_t>(clamp(min(lanes.end[lane] - key, count), 0, W));
    const I sees = (lane_numbers() >= begin) & (lane_numbers() < end);
    return sees ? value : splat(kMinusInfinity);
  }

  // Raises m where the tile's maximum has outgrown it, and rescales l and o then.
  TILEWISE_FN float raise_maximum(int64_t row, float highest) {
    if (highest > m[row] + kOutgrown / exponent) {
      const F alpha = exp2<kExpDegree<float>>(splat((m[row] - highest) * exponent));
      m[row] = highest;
      store(l + row * W, load(l + row * W) * alpha);
      for (int64_t c = 0; c < o_ld; c += W) store(o_of(row) + c, load(o_of(row) + c) * alpha);
    }
    return exponent_base(m[row]);
  }

  // s becomes p; m, l and o follow.
  TILEWISE_FN void softmax(int64_t row, int64_t lane, int64_t head, Range keys) {
    float* const at = s_of(row);
    const Range seen = {lanes.begin[lane], lanes.end[lane]};
    const bool inside = seen.begin <= keys.begin && keys.end <= seen.end && keys.size() == padded;
    F highest = splat(kMinusInfinity);
    for (int64_t i = 0; i < padded; i += W) {
      if (general || !inside)
        store(at + i, score_at(lane, head, keys.begin + i, keys.size() - i, load(at + i)));
      highest = vmax(highest, load(at + i));
    }
    const float base = raise_maximum(row, max_lane(highest));
    const int64_t batch_head = s.batch * p.heads_q + head;
    F sum{};
    for (int64_t i = 0; i < padded; i += W) {
      F w = exp2<kExpDegree<T>>((load(at + i) - base) * exponent);
      sum = sum + w;
      if (dropout.on())
        w = w * keep_scale_of_keys(dropout, batch_head, lanes.row[lane], keys.begin + i);
      Reader::store_weights(at, i, w);
    }
    store(l + row * W, load(l + row * W) + sum);
  }

  // o of R rows += p v of two keys, or of one: V reads of columns from `c` on.
  template <int R, int V, bool kWhole, bool kTwo>
  TILEWISE_FN void weigh(const T* const* v, int64_t offset, int64_t c, const float* weights,
                         int64_t key, F (&sum)[R][V][kParts]) const {
    const auto read_at = [&](const T* row, int64_t column) {
      if constexpr (kWhole)
        return Reader::read(row + offset + column);
      else
        return read(row + offset, min(p.head_dim_v, column), p.head_dim_v);
    };
    for (int j = 0; j < V; ++j) {
      const int64_t column = c + j * kColumns;
      for (int i = 0; i <= int{kTwo}; ++i) __builtin_prefetch(v[i + ahead_v] + offset + column);
      const auto values =
          Reader::values(read_at(v[0], column), kTwo ? read_at(v[1], column) : Read{});
      for (int r = 0; r < R; ++r) Reader::weigh(sum[r][j], values, weights + r * tile_k, key);
    }
  }

  TILEWISE_FN void add_to_o(int64_t row, int64_t c, const F (&sum)[kParts]) const {
    for (int i = 0; i < kParts; ++i) {
      float* const at = o_of(row) + c + i * W;
      store(at, load(at) + sum[i]);
    }
  }

  template <int R, int V, bool kWhole>
  TILEWISE_FN void accumulate_group(Range keys, int64_t h, int64_t c) const {
    const T* const* const v = rows + padded;
    const int64_t offset = h * p.v.stride_head;
    const float* const weights = s_of(h * R);
    F sum[R][V][kParts] = {};
    for (int64_t key = keys.begin; key + 1 < keys.end; key += 2)
      weigh<R, V, kWhole, true>(v + key, offset, c, weights, key, sum);
    if (keys.size() % 2 != 0)
      weigh<R, V, kWhole, false>(v + keys.end - 1, offset, c, weights, keys.end - 1, sum);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) add_to_o(h * R + r, c + j * kColumns, sum[r][j]);
  }

  template <int R>
  __attribute__((noinline)) void accumulate_of(int64_t count) const {
    constexpr int V = max(1, min(8, kSums / R) / kParts);
    for (int64_t first = 0; first < count; first += kGroup)
      for (int64_t h = 0; h < task.heads; ++h)
        for (int64_t c = 0; c < p.head_dim_v; c += V * kColumns) {
          const Range keys = {first, min<int64_t>(count, first + kGroup)};
          if (c + V * kColumns <= p.head_dim_v)
            accumulate_group<R, V, true>(keys, h, c);
          else
            accumulate_group<R, V, false>(keys, h, c);
        }
  }

  // Whether a weight of 0 times an infinity or NaN would reach a row that must not see it.
  TILEWISE_FN bool hides_nonfinite(Range keys) const {
    if (lanes.panel_covers(0, keys)) return false;
    for (int64_t key = 0; key < keys.size(); ++key)
      for (int64_t h = 0; h < task.heads; ++h)
        if (!row_is_finite(rows[padded + key] + h * p.v.stride_head, p.head_dim_v)) return true;
    return false;
  }

  // The same sums, of the keys whose weight is not 0.
  TILEWISE_FN void accumulate_seen(int64_t count) const {
    const T* const* const v = rows + padded;
    for_rows([&](int64_t row, int64_t, int64_t h) {
      for (int64_t first = 0; first < count; first += kGroup)
        for (int64_t c = 0; c < p.head_dim_v; c += kColumns) {
          const auto seen = [&](int64_t key) {
            if (key >= count || Reader::weight(s_of(row), key) == 0.0f) return Read{};
            return read(v[key] + h * p.v.stride_head, c, p.head_dim_v);
          };
          F sum[kParts] = {};
          for (int64_t key = first; key < min(count, first + kGroup); key += 2)
            Reader::weigh(sum, Reader::values(seen(key), seen(key + 1)), s_of(row), key);
          add_to_o(row, c, sum);
        }
    });
  }

  TILEWISE_FN void run() {
    begin();
    const Tiling tiling{s.band.keys, tile_k};
    const Range tiles = tiling.touching(intersect(lanes.all_lanes_any(W), task.keys));
    const auto keys_at = [&](int64_t j) {
      return j < tiles.end ? intersect(tiling.at(j), task.keys) : Range{};
    };
    if (!tiles.empty()) list(rows, wide_k, keys_at(tiles.begin), p.k, p.head_dim);
    for (int64_t j = tiles.begin; j < tiles.end; ++j) {
      const Range keys = keys_at(j);
      padded = round_up(keys.size(), W);
      const T** const next = list(rows + padded, wide_v, keys, p.v, p.head_dim_v);
      with_rows([&](auto R) { scores_of<R>(); });
      for_rows([&](int64_t row, int64_t lane, int64_t h) {
        softmax(row, lane, head_of(lane, h), keys);
      });
      list(next, wide_k, keys_at(j + 1), p.k, p.head_dim);
      if (hides_nonfinite(keys))
        accumulate_seen(keys.size());
      else
        with_rows([&](auto R) { accumulate_of<R>(keys.size()); });
      __builtin_memmove(rows, next, static_cast<size_t>(tile_k) * sizeof(*rows));
    }
    for_rows([&](int64_t row, int64_t lane, int64_t h) { finish(row, lane, h); });
  }

  // out = o / l and lse = m + log(l).
  TILEWISE_FN void finish(int64_t row, int64_t lane, int64_t h) const {
    const float sum = sum_lanes(load(l + row * W));
    const float factor = sum == 0.0f ? 0.0f : v_descale(p, s.batch, task.kv_head + h) / sum;
    const float lse = lse_of(m[row], sum, exponent);
    if (task.partial_out != nullptr) {
      const int64_t at = h * task.partial_stride + lane;
      task.partial_lse[at] = lse;
      return write(task.partial_out + at * p.head_dim_v, row, factor);
    }
    const int64_t i = lanes.row[lane];
    const int64_t head = head_of(lane, h);
    if (p.lse != nullptr) p.lse[lse_index(p, s, i, head)] = lse;
    write(static_cast<T*>(p.out.data) + s.row_offset(p.out, i) + head * p.out.stride_head, row,
          factor);
  }

  template <class To>
  TILEWISE_FN void write(To* to, int64_t row, float factor) const {
    for (int64_t c = 0; c < p.head_dim_v; c += kColumns) {
      F part[kParts];
      for (int i = 0; i < kParts; ++i) part[i] = load(o_of(row) + c + i * W) * factor;
      Reader::in_order(part);
      for (int i = 0; i < kParts && c + i * W < p.head_dim_v; ++i) {
        const int64_t at = c + i * W;
        if (at + W <= p.head_dim_v)
          from_fp32(to + at, part[i]);
        else
          from_fp32_tail(to + at, part[i], p.head_dim_v - at);
      }
    }
  }
};

// As many heads at once as there is room for.
template <class T, Isa kIsa>
void decode_item(const ForwardTask& task, Arena scratch) {
  constexpr Shape shape = thin_shape_of(kIsa, TILEWISE_FLOAT32);
  static_assert(shape.lanes == W && shape.tile_q <= Decode<T>::kMostRows);
  int64_t rows = 1;
  while (rows < task.packed_rows.size()) rows *= 2;
  ForwardTask part = task;
  for (int64_t h = 0; h < task.heads; h += part.heads) {
    part.kv_head = task.kv_head + h;
    part.heads = min(kDecodeRows / rows, task.heads - h);
    if (task.partial_out != nullptr) {
      const int64_t row = h * task.partial_stride;
      part.partial_out = task.partial_out + row * task.problem->head_dim_v;
      part.partial_lse = task.partial_lse + row;
    }
    Arena arena = scratch;
    Decode<T>(shape, part, arena).run();
  }
}

}  // namespace
}  // namespace tilewise::cpu
