// The two products of the forward, S^T = K Q^T and O^T += V^T P^T, in the two ways they are
// computed: packed operands on a matrix engine, or, for the few rows of decoding, streamed from
// where they lie.
#pragma once

#include "cpu/generic/engine.h"
#include "cpu/generic/lanes.h"

namespace tilewise::cpu {
namespace {

// Keys are packed once per tile and used by every panel.
template <class E>
struct PackedProducts {
  using T = typename E::Storage;
  static constexpr Shape S = E::S;
  static constexpr int64_t kKeyStep = max<int64_t>(8, max<int64_t>(S.rows, S.units* S.pair));

  static constexpr bool kPacked = true;

  const ForwardScratch& x;
  const Problem& p;
  const uint32_t* k = nullptr;
  const uint32_t* v = nullptr;
  int64_t packed_keys = 0;

  // A tile that pack() has made.
  TILEWISE_FN void use(const uint32_t* tile, int64_t count) {
    packed_keys = count;
    k = tile;
    v = tile + S.parts * x.k_plane;
  }

  TILEWISE_FN void load_queries(const T* const* rows, int64_t panels, bool negate) {
    for (int64_t i = 0; i < panels; ++i)
      pack_columns_transposed<E>(x.q + i * x.qk.units * S.panel, S.panel, x.q_plane,
                                 rows + i * S.panel, S.panel, p.head_dim, x.qk.units);
    if (negate) E::negate(x.q, S.parts * x.q_plane);
  }
  TILEWISE_FN void load_keys(const T* const* rows, int64_t count) {
    packed_keys = count;
    k = x.k;
    pack_columns<E>(x.k, x.qk.ld, x.k_plane, rows, count, p.head_dim);
  }
  TILEWISE_FN void load_values(const T* const* rows, int64_t count) {
    v = x.v;
    E::pack_rows_a(x.v, x.dv.m_ld, x.v_plane, rows, count, p.head_dim_v);
  }
  // s_tile[key][lane]
  TILEWISE_FN void scores(int64_t panel, int64_t keys, int64_t vectors) const {
    E::gemm(x.s_tile, S.panel, false, {k, x.qk.ld, 1, x.k_plane}, keys,
            {x.q + panel * x.qk.units * S.panel, S.panel, x.q_plane}, vectors, x.qk.units);
  }
  // o[dv][lane] += weights
  TILEWISE_FN void accumulate(int64_t panel, int64_t keys, int64_t vectors) const {
    E::gemm(x.o + panel * x.dv.m * S.panel, S.panel, true,
            E::rows_a(v, x.dv.m_ld, packed_keys, x.v_plane), x.dv.m,
            {x.weights, S.panel, x.weights_plane}, vectors, keys / S.pair);
  }
};

// How streaming reads storage: kParts vectors of fp32 from kColumns neighbours. bf16 comes in
// pairs, the even columns and the odd ones, because that is two operations where widening in order
// is four.
template <class T>
struct Reader {
  static constexpr int kParts = 1;
  TILEWISE_FN static void read(const T* p, F (&part)[1]) { part[0] = to_fp32(p); }
};
template <>
struct Reader<BFloat16> {
  static constexpr int kParts = 2;
  TILEWISE_FN static void read(const BFloat16* p, F (&part)[2]) {
    const U pairs = load_as<U>(p);
    const U even = pairs << 16;
    const U odd = pairs & 0xffff0000u;
    part[0] = load_as<F>(&even);
    part[1] = load_as<F>(&odd);
  }
};

// Decoding reads every key once for at most thin_rows packed rows: the time is the memory's, and a
// packed copy, or 16 lanes for one row, would be too slow for it. Here the vectors run along the
// head dimension: K and V are read where they are, each once.
template <class E>
struct StreamedProducts {
  using T = typename E::Storage;
  using Read = Reader<T>;
  static constexpr Shape S = E::S;
  static constexpr int64_t kKeyStep = max<int64_t>(8, W);
  static constexpr bool kPacked = false;
  static constexpr int64_t kPrefetchKeys = 24;  // 100 ns of memory latency at 4 ns a key
  static constexpr int kRows = S.tile_q;
  static constexpr int kParts = Read::kParts;
  static constexpr int kColumns = kParts * W;  // of one read

  const ForwardScratch& x;
  const Problem& p;
  int64_t rows = 0;
  // Addresses of the tile's keys, in the room of the packed operands that are not needed.
  const T** k_rows = reinterpret_cast<const T**>(x.k);
  const T** v_rows = reinterpret_cast<const T**>(x.v);
  float* q = reinterpret_cast<float*>(x.q);  // [row][read][part][lane]

  TILEWISE_FN int64_t q_ld() const { return round_up(p.head_dim, kColumns); }

  TILEWISE_FN static void read(const T* row, int64_t column, int64_t columns, F (&part)[kParts]) {
    if (column + kColumns <= columns) return Read::read(row + column, part);
    T buffer[kColumns] = {};
    for (int64_t i = column; i < columns; ++i) buffer[i - column] = row[i];
    Read::read(buffer, part);
  }

  TILEWISE_FN void load_queries(const T* const* from, int64_t, bool negate) {
    rows = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      rows += from[r] != nullptr ? 1 : 0;
      for (int64_t c = 0; c < q_ld(); c += kColumns) {
        F part[kParts] = {};
        if (from[r] != nullptr) read(from[r], c, p.head_dim, part);
        for (int i = 0; i < kParts; ++i)
          store(q + r * q_ld() + c + i * W, negate ? -part[i] : part[i]);
      }
    }
  }
  TILEWISE_FN void load_keys(const T* const* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) k_rows[i] = from[i];
    for (int64_t i = 0; i < kPrefetchKeys; i += 2)
      prefetch(k_rows, i - kPrefetchKeys, count, p.head_dim);
  }
  TILEWISE_FN void load_values(const T* const* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) v_rows[i] = from[i];
  }

  TILEWISE_FN void scores(int64_t, int64_t keys, int64_t) const {
    if (rows <= 1) return scores_of<1>(keys);
    if (rows <= 2) return scores_of<2>(keys);
    if (rows <= 4) return scores_of<4>(keys);
    scores_of<kRows>(keys);
  }
  TILEWISE_FN void accumulate(int64_t, int64_t keys, int64_t) const {
    if (rows <= 1) return accumulate_of<1, 8 / kParts>(keys);
    if (rows <= 2) return accumulate_of<2, 8 / kParts>(keys);
    if (rows <= 4) return accumulate_of<4, 4 / kParts>(keys);
    accumulate_of<kRows, 2 / kParts>(keys);
  }

  // q . k for two keys: sums over lanes are still to be added up. A null row gives 0.
  template <int R>
  TILEWISE_FN void two_keys(const T* k0, const T* k1, F (&sum0)[R], F (&sum1)[R]) const {
    const auto add = [&](int64_t c, const F(&v0)[kParts], const F(&v1)[kParts]) {
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kParts; ++i) {
          const F query = load(q + r * q_ld() + c + i * W);
          sum0[r] = sum0[r] + v0[i] * query;
          sum1[r] = sum1[r] + v1[i] * query;
        }
    };
    F v0[kParts];
    F v1[kParts];
    int64_t c = 0;
    for (; c + kColumns <= p.head_dim; c += kColumns) {
      Read::read(k0 + c, v0);
      Read::read(k1 + c, v1);
      add(c, v0, v1);
    }
    if (c == p.head_dim) return;
    read(k0, c, p.head_dim, v0);
    read(k1, c, p.head_dim, v1);
    add(c, v0, v1);
  }

  // W keys at a time: R sums of products per key, W of them transposed and added give R rows of
  // scores, and those transposed the lanes of s_tile. Rows past the last key are null.
  template <int R>
  __attribute__((noinline)) void scores_of(int64_t keys) const {
    for (int64_t first = 0; first < keys; first += W) {
      F sums[R][W];
      for (int i = 0; i < W; i += 2) {
        const T* const k0 = k_rows[first + i];
        const T* const k1 = k_rows[first + i + 1] != nullptr ? k_rows[first + i + 1] : k0;
        F sum0[R] = {};
        F sum1[R] = {};
        if (k0 != nullptr) {
          // Near the end of K, the first rows of V.
          if (first + i + kPrefetchKeys < keys)
            prefetch(k_rows, first + i, keys, p.head_dim);
          else
            prefetch(v_rows, first + i - keys, keys, p.head_dim_v);
          two_keys<R>(k0, k1, sum0, sum1);
        }
        for (int r = 0; r < R; ++r) {
          sums[r][i] = sum0[r];
          sums[r][i + 1] = sum1[r];
        }
      }
      F lanes[W] = {};
      for (int r = 0; r < R; ++r) {
        transpose(sums[r]);
        for (int half = W / 2; half > 0; half /= 2)
          for (int i = 0; i < half; ++i) sums[r][i] = sums[r][i] + sums[r][i + half];
        lanes[r] = sums[r][0];
      }
      transpose(lanes);
      for (int i = 0; i < W; ++i) store(x.s_tile + (first + i) * S.panel, lanes[i]);
    }
  }

  // V reads of columns from `c` on, over all keys, in registers.
  template <int R, int V, bool kWhole>
  TILEWISE_FN void weigh(int64_t keys, int64_t c, F (&sum)[R][V][kParts]) const {
    for (int64_t key = 0; key < keys; ++key) {
      const T* const row = v_rows[key];
      if (row == nullptr) continue;
      if (c == 0 && key % 2 == 0) prefetch(v_rows, key, keys, p.head_dim_v);
      const float* const weight = x.s_tile + key * S.panel;
      for (int j = 0; j < V; ++j) {
        F value[kParts];
        if constexpr (kWhole)
          Read::read(row + c + j * kColumns, value);
        else
          read(row, min(p.head_dim_v, c + j * kColumns), p.head_dim_v, value);
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < kParts; ++i) sum[r][j][i] = sum[r][j][i] + value[i] * weight[r];
      }
    }
  }

  template <int R, int V>
  __attribute__((noinline)) void accumulate_of(int64_t keys) const {
    for (int64_t c = 0; c < p.head_dim_v; c += V * kColumns) {
      F sum[R][V][kParts] = {};
      if (c + V * kColumns <= p.head_dim_v)
        weigh<R, V, true>(keys, c, sum);
      else
        weigh<R, V, false>(keys, c, sum);
      for (int j = 0; j < V; ++j)
        for (int i = 0; i < kParts; ++i) {
          F block[W] = {};
          for (int r = 0; r < R; ++r) block[r] = sum[r][j][i];
          transpose(block);
          for (int lane = 0; lane < W; ++lane) {
            const int64_t column = c + j * kColumns + lane * kParts + i;
            if (column >= p.head_dim_v) break;
            float* const o = x.o + column * S.panel;
            store(o, load(o) + block[lane]);
          }
        }
    }
  }

  // The hardware does not follow rows that are a few kilobytes apart: two rows, some keys ahead.
  TILEWISE_FN static void prefetch(const T* const* all, int64_t key, int64_t keys,
                                   int64_t columns) {
    for (int64_t ahead = key + kPrefetchKeys; ahead < min(keys, key + kPrefetchKeys + 2); ++ahead)
      if (all[ahead] != nullptr)
        for (int64_t c = 0; c < columns; c += 64 / static_cast<int64_t>(sizeof(T)))
          __builtin_prefetch(all[ahead] + c, 0, 2);
  }
};

}  // namespace
}  // namespace tilewise::cpu
