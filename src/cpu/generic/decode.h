// The forward of decoding: few packed query rows (at most max_decode_rows per key/value head)
// and many keys.
//
// Work item  Those rows of one or more neighbouring key/value heads, and the keys of a split.
// Loops      Key tiles; in each the scores of all heads, then the softmax row by row, then p v.
//
//   s[row][key] = q k^T
//   p           = 2^((s - m) c)   m and l kept per row (SoftmaxScaling)
//   o[row]     += p v
//
// The time is that of reading K and V. Both are therefore read once, in place, without packing
// and in memory order: a few keys of every head of the work item at a time. q, s, p and o
// live in scratch memory and stay in the cache. In the softmax the vectors run along keys;
// decode_dots.h and decode_tiles.h say how the products use them.
#pragma once

#include "cpu/generic/decode_dots.h"
#include "cpu/generic/lane_mask.h"
#include "cpu/generic/score_tile.h"
#include "cpu/generic/softmax.h"

namespace tilewise::cpu {
namespace {

// Rounded up to a power of two: the products take their number of rows as a constant.
TILEWISE_FN int64_t decode_rows_of_head(int64_t rows) {
  int64_t rounded = 1;
  while (rounded < rows) rounded *= 2;
  return rounded;
}

// Cached: the storage type of K and V, either T itself or Float8.
template <class T, class Cached, class Products>
struct Decode : DecodeScratch {
  using Reader = Stream<Cached>;
  using Read = typename Reader::Read;
  static constexpr bool kFloat8 = !std::is_same_v<T, Cached>;
  static constexpr int kParts = Reader::kParts;
  static constexpr int kColumns = Reader::kColumns;
  static constexpr int kMaxRows = Products::kMaxRows;  // per head

  const ForwardTask& task;
  const Problem& p;
  const Sequence& s;
  Lanes lanes;  // rows of the first head
  LaneMask row_mask;
  const Score score;
  const Dropout dropout;
  SoftmaxScaling<T> scaling;
  const int64_t rows_of_head;  // per head, rounded up
  // Row addresses of the first head: the keys and values of the tile, followed by those to
  // prefetch.
  const Cached** const keys_of_tile;
  const Cached** const values_of_tile;
  int64_t count = 0;   // keys of the tile
  int64_t padded = 0;  // `count` rounded up to a whole step
  Products products;

  TILEWISE_FN Decode(const Shape& shape, const ForwardTask& t, Arena& arena)
      : DecodeScratch(shape, *t.problem, arena),
        task(t),
        p(*t.problem),
        s(t.sequence),
        lanes{DecodeScratch::lanes},
        row_mask{DecodeScratch::mask},
        score(kFloat8 ? score_of(p) : score_of(p, s.batch, t.kv_head)),
        dropout(dropout_of(p)),
        scaling(SoftmaxScaling<T>::of(score, is_general(p, score))),
        rows_of_head(decode_rows_of_head(t.packed_rows.size())),
        keys_of_tile(reinterpret_cast<const Cached**>(rows)),
        values_of_tile(keys_of_tile + tile_k + Products::kMaxPrefetchDistance),
        products(task) {}

  TILEWISE_FN int64_t reads_of_q() const { return ceil_div(p.head_dim, kColumns); }
  TILEWISE_FN int64_t panel() const { return round_up(task.packed_rows.size(), W); }  // all lanes
  // The factors for products with K and with V of a head.
  TILEWISE_FN float unit_of_k(int64_t h) const {
    return kFloat8 ? Reader::kUnit * k_descale(p, s.batch, task.kv_head + h) : 1.0f;
  }
  TILEWISE_FN float unit_of_v(int64_t h) const {
    return Reader::kUnit * v_descale(p, s.batch, task.kv_head + h);
  }
  TILEWISE_FN float* s_of(int64_t row) const { return s_tile + row * tile_k; }
  TILEWISE_FN float* o_of(int64_t row) const { return o + row * o_ld; }

  // Columns past the last one read as zeros.
  TILEWISE_FN static Read read(const Cached* row, int64_t column, int64_t columns) {
    return column + kColumns <= columns ? Reader::read(row + column)
                                        : Reader::read_first(row + column, columns - column);
  }
  TILEWISE_FN static Read read_query(const T* row, int64_t column, int64_t columns) {
    if constexpr (!kFloat8) {
      return read(row, column, columns);
    } else {
      Read r;
      for (F& part : r.part) {
        part = column + W <= columns
                   ? to_fp32(row + column)
                   : to_fp32_tail(row + column, max<int64_t>(0, columns - column));
        column += W;
      }
      return r;
    }
  }

  // Calls body with the number of rows per head, rounded up to what a product takes, as a constant.
  template <class Body>
  TILEWISE_FN void with_rows(const Body& body) const {
    constexpr int kRowsPerProduct = Products::kRows;
    if (lanes.count <= 1) return body(std::integral_constant<int, 1>{});
    if (lanes.count <= 2) return body(std::integral_constant<int, 2>{});
    if (lanes.count <= 4) return body(std::integral_constant<int, 4>{});
    if (lanes.count <= 8) return body(std::integral_constant<int, min(8, kRowsPerProduct)>{});
    body(std::integral_constant<int, kRowsPerProduct>{});
  }

  // Calls body(row of the scratch memory, lane, kv head of the task) for every valid row.
  template <class Body>
  TILEWISE_FN void for_rows(const Body& body) const {
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t lane = 0; lane < lanes.count; ++lane) body(h * rows_of_head + lane, lane, h);
  }
  TILEWISE_FN int64_t head_of(int64_t lane, int64_t h) const {
    return lanes.head[lane] + h * group_size(p);
  }

  TILEWISE_FN void begin() {
    lanes.fill(p, s, task.kv_head, task.packed_rows, panel());
    const Range rows_of_q = {lanes.row[0], lanes.row[lanes.count - 1] + 1};
    row_mask.begin(p, s, task.kv_head, rows_of_q, task.keys, task.heads);
    const bool negate = !scaling.general && score.scale < 0.0f;
    const T* from[kMaxRows];
    lane_rows(from, lanes, lanes.count, s, p.q);
    const int64_t reads = task.heads * rows_of_head * reads_of_q();
    __builtin_memset(q, 0, static_cast<size_t>(reads) * sizeof(Read));
    for_rows([&](int64_t row, int64_t lane, int64_t h) {
      const T* const q_row = from[lane] + h * group_size(p) * p.q.stride_head;
      for (int64_t c = 0; c < reads_of_q(); ++c) {
        Read part = read_query(q_row, c * kColumns, p.head_dim);
        if (negate) Reader::negate(part);
        Products::place_q(*this, part, h, lane, c);
      }
      const SoftmaxState state = first_state(task, head_of(lane, h), scaling);
      m[row] = state.m;
      F sum{};
      sum[0] = state.l;
      store(l + row * W, sum);
      if (rounding != nullptr) store(rounding + row * W, F{});
      for (int64_t c = 0; c < o_ld; c += W) store(o_of(row) + c, F{});
    });
  }

  // Lists the addresses of `keys` and of up to `prefetch_distance` keys after them, and then
  // repeats the first one until the list has that many entries more than the keys, padded to a
  // whole step. Float8 rows that are copied are not prefetched.
  TILEWISE_FN void list(const Cached** to, const WideScratch& wide, Range keys,
                        int64_t prefetch_distance, const tilewise_tensor& view,
                        int64_t columns) const {
    const Range more = {keys.begin, min(keys.end + prefetch_distance, task.keys.end)};
    int64_t listed = more.size();
    if (!kFloat8 && p.kv_float8 != 0) {
      listed = keys.size();
      keys_of(to, wide, keys, listed, p, s, view, task.kv_head, columns);
    } else {
      key_rows(to, more, listed, s.kv, view, task.kv_head);
    }
    const int64_t end = round_up(keys.size(), Products::kStep) + prefetch_distance;
    for (int64_t i = listed; i < end; ++i) to[i] = to[0];
  }

  // Applies the score options and the band to W keys of a row from `key` of the sequence on, of
  // which `left` exist.
  TILEWISE_FN F score_at(int64_t lane, int64_t head, int64_t key, int64_t left, F raw) const {
    F value = raw;
    if (scaling.general) {
      const auto diagonal = static_cast<int32_t>(lanes.row[lane] + s.band.shift() - key);
      const int64_t offset = bias_offset(p, s.batch, head, lanes.row[lane]) + key;
      const F bias = p.bias != nullptr ? bias_of_keys(p, offset, left) : F{};
      const F slope = splat(slope_of(p, s.batch, head));
      value = score.apply<VectorMath>(raw, slope, magnitude(diagonal - lane_numbers()), bias).value;
    }
    const auto begin = static_cast<int32_t>(clamp(lanes.begin[lane] - key, 0, W));
    const auto end = static_cast<int32_t>(clamp(min(lanes.end[lane] - key, left), 0, W));
    const I sees = (lane_numbers() >= begin) & (lane_numbers() < end);
    return sees ? value : splat(kMinusInfinity);
  }

  // Raises m where the maximum of the tile exceeds it by the threshold, and then rescales l and o.
  TILEWISE_FN float raise_maximum(int64_t row, float highest) {
    if (highest > m[row] + kRescaleThreshold / scaling.c) {
      const F alpha = scaling.alpha(splat(m[row]), splat(highest));
      m[row] = highest;
      store(l + row * W, load(l + row * W) * alpha);
      if (rounding != nullptr) store(rounding + row * W, load(rounding + row * W) * alpha);
      for (int64_t c = 0; c < o_ld; c += W) store(o_of(row) + c, load(o_of(row) + c) * alpha);
    }
    return exponent_base(m[row]);
  }

  // Reads which keys of a tile the mask shows a row, unless it is that of the lane before.
  TILEWISE_FN void load_mask(int64_t lane, int64_t head, Range keys) const {
    const int64_t row = lanes.row[lane];
    if (lane == 0 || row_mask.mask.per_head() || row != lanes.row[lane - 1])
      row_mask.load_row(head, row, keys, row_mask.bits);
  }

  // Turns s into p and updates m, l and o. `partial`: the mask may hide keys of the tile.
  TILEWISE_FN void softmax(int64_t row, int64_t lane, int64_t head, Range keys, bool partial) {
    if (partial) load_mask(lane, head, keys);
    float* const at = s_of(row);
    const Range seen = {lanes.begin[lane], lanes.end[lane]};
    const bool inside = seen.begin <= keys.begin && keys.end <= seen.end && keys.size() == padded;
    F highest = splat(kMinusInfinity);
    for (int64_t i = 0; i < padded; i += W) {
      if (scaling.general || !inside)
        store(at + i, score_at(lane, head, keys.begin + i, keys.size() - i, load(at + i)));
      if (partial) store(at + i, row_mask.sees_keys(i) ? load(at + i) : splat(kMinusInfinity));
      highest = vmax(highest, load(at + i));
    }
    const F base = scaling.base(splat(raise_maximum(row, max_lane(highest))));
    if (scaling.fused())
      exponentiate<SoftmaxScaling<T>::kMayFuse>(row, lane, head, keys, base);
    else
      exponentiate<false>(row, lane, head, keys, base);
  }

  template <bool kFused>
  TILEWISE_FN void exponentiate(int64_t row, int64_t lane, int64_t head, Range keys, F base) {
    float* const at = s_of(row);
    const SoftmaxScaling<T> w_of = scaling;
    const int64_t batch_head = dropout_head(p, s.batch, head);
    F sum{};
    F added{};
    const bool has_rounding = Reader::kRoundsWeights && rounding != nullptr;
    for (int64_t i = 0; i < padded; i += W) {
      F w = exp2<kExpDegree<T>>(w_of.template exponent<kFused>(load(at + i), base));
      sum = sum + w;
      if (dropout.on())
        w = w * keep_scale_of_keys(dropout, batch_head, lanes.row[lane], keys.begin + i);
      Reader::store_weights(at, i, w);
      if (has_rounding) added = added + bf16_rounding(w, F{});
    }
    store(l + row * W, load(l + row * W) + sum);
    if (has_rounding) store(rounding + row * W, load(rounding + row * W) + added);
  }

  TILEWISE_FN void add_to_o(int64_t row, int64_t c, const F (&sum)[kParts]) const {
    for (int i = 0; i < kParts; ++i) {
      float* const at = o_of(row) + c + i * W;
      store(at, load(at) + sum[i]);
    }
  }

  // Whether a weight of 0 times an infinity or NaN would reach a row that does not see that key.
  TILEWISE_FN bool hides_nonfinite(Range keys, bool partial) const {
    if (!partial && lanes.panel_covers(0, keys)) return false;
    for (int64_t key = 0; key < keys.size(); ++key)
      for (int64_t h = 0; h < task.heads; ++h)
        if (!row_is_finite(values_of_tile[key] + h * p.v.stride_head, p.head_dim_v)) return true;
    return false;
  }

  // The same sums as `accumulate`, over the keys whose weight is not 0.
  TILEWISE_FN void accumulate_seen() const {
    const int64_t group = DotProducts<Cached>::group_of(p, rows_of_head);
    for_rows([&](int64_t row, int64_t, int64_t h) {
      for (int64_t first = 0; first < count; first += group)
        for (int64_t c = 0; c < p.head_dim_v; c += kColumns) {
          const auto seen = [&](int64_t key) {
            if (key >= count || Reader::weight(s_of(row), key) == 0.0f) return Read{};
            return read(values_of_tile[key] + h * p.v.stride_head, c, p.head_dim_v);
          };
          F sum[kParts] = {};
          for (int64_t key = first; key < min(count, first + group); key += Reader::kKeys) {
            Read read[Reader::kKeys];
            for (int i = 0; i < Reader::kKeys; ++i) read[i] = seen(key + i);
            Reader::weigh(sum, Reader::values(read), s_of(row), key);
          }
          add_to_o(row, c, sum);
        }
    });
  }

  TILEWISE_FN void run() {
    for (bool again = false;; again = true) {
      attend_all();
      bool more = false;
      for_rows([&](int64_t row, int64_t lane, int64_t h) {
        const float sum = sum_lanes(load(l + row * W));
        if (!again) more |= huge[row] = scaling.huge(splat(m[row]), splat(sum))[0] != 0;
        if (huge[row] == again) finish(row, lane, h, sum);
      });
      if (again || !more) return;
      scaling = SoftmaxScaling<T>::of(score, true);
    }
  }

  TILEWISE_FN void attend_all() {
    begin();
    [[maybe_unused]] const typename Products::Session session{lanes.count};
    const Tiling tiling{s.band.keys, tile_k};
    const Range seen = intersect(lanes.all_lanes_any(panel()), task.keys);
    const TileWalk walk = row_mask.walk(lanes, panel(), tiling, seen);
    for (int64_t j = walk.first(); j < walk.end(); j = walk.after(j)) {
      const Range keys = intersect(tiling.at(j), task.keys);
      const bool partial = walk.of(j, 0) != Coverage::full;
      count = keys.size();
      padded = round_up(count, Products::kStep);
      list(keys_of_tile, wide_k, keys, products.prefetch_distance_k, p.k, p.head_dim);
      list(values_of_tile, wide_v, keys, products.prefetch_distance_v, p.v, p.head_dim_v);
      with_rows([&](auto R) { products.template scores<R>(*this); });
      for_rows([&](int64_t row, int64_t lane, int64_t h) {
        softmax(row, lane, head_of(lane, h), keys, partial);
      });
      if (hides_nonfinite(keys, partial))
        accumulate_seen();
      else
        with_rows([&](auto R) { products.template accumulate<R>(*this); });
    }
  }

  // out = o / l, where l may be that of the rounded weights, and lse = m + log(l).
  TILEWISE_FN void finish(int64_t row, int64_t lane, int64_t h, float sum) const {
    float divisor = sum;
    if (rounding != nullptr) divisor += sum_lanes(load(rounding + row * W)) / dropout.keep_scale;
    const float factor = sum == 0.0f ? 0.0f : unit_of_v(h) / divisor;
    const LogSums sums = lse_of(splat(m[row]), splat(sum), scaling);
    if (task.partial_out != nullptr) {
      const int64_t at = h * task.partial_stride + lane;
      task.partial_lse[at] = sums.lse[0];
      task.partial_low[at] = sums.low[0];
      return write(task.partial_out + at * p.head_dim_v, row, factor);
    }
    const int64_t i = lanes.row[lane];
    const int64_t head = head_of(lane, h);
    write_lse(p, s, i, head, sums.lse[0], sums.low[0]);
    with_out_type<T>(p, [&](auto type) {
      using Out = typename decltype(type)::type;
      write(static_cast<Out*>(p.out.data) + s.row_offset(p.out, i) + head * p.out.stride_head, row,
            factor);
    });
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

// Computes as many heads at once as the scratch memory has rows for. Float8 rows are read in
// place if the vector products can take all query rows; otherwise they are first converted
// to the dtype of q, one head at a time.
template <class T, class Products, Isa kIsa>
void decode_item(const ForwardTask& task, Arena scratch) {
  using Float8Products = DotProducts<Float8>;
  constexpr Shape shape = decode_shape_of(kIsa, kDtype<T>);
  static_assert(shape.lanes == W && shape.tile_q <= Products::kMaxRows);
  const int64_t rows = decode_rows_of_head(task.packed_rows.size());
  const bool float8 = sizeof(T) == 2 && task.problem->kv_float8 != 0;
  const bool copied = float8 && rows > Float8Products::kMaxRows;
  ForwardTask part = task;
  for (int64_t h = 0; h < task.heads; h += part.heads) {
    part.kv_head = task.kv_head + h;
    part.heads = copied ? 1 : min(kDecodeRows / rows, task.heads - h);
    if (task.partial_out != nullptr) {
      const int64_t row = h * task.partial_stride;
      part.partial_out = task.partial_out + row * task.problem->head_dim_v;
      part.partial_lse = task.partial_lse + row;
      part.partial_low = task.partial_low + row;
    }
    Arena arena = scratch;
    if constexpr (sizeof(T) == 2) {
      if (float8 && !copied) {
        Decode<T, Float8, Float8Products>(shape, part, arena).run();
        continue;
      }
    }
    Decode<T, T, Products>(shape, part, arena).run();
  }
}

}  // namespace
}  // namespace tilewise::cpu
