// The two products of the forward, S^T = K Q^T and O^T += V^T P^T, on packed operands.
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

  const ForwardScratch& x;
  const Problem& p;
  const uint32_t* k = nullptr;
  const uint32_t* v = nullptr;
  int64_t packed_keys = 0;

  // Uses a tile that pack() has packed.
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
  // s_tile[key][lane] for these keys of the tile
  TILEWISE_FN void scores(int64_t panel, Range keys, int64_t vectors) const {
    E::gemm(x.s_tile, S.panel, false, {k + keys.begin * x.qk.ld, x.qk.ld, 1, x.k_plane},
            keys.size(), {x.q + panel * x.qk.units * S.panel, S.panel, x.q_plane}, vectors,
            x.qk.units);
  }
  // o[dv][lane] = V^T P^T over these keys, or += if `adds`
  TILEWISE_FN void accumulate(int64_t panel, Range keys, int64_t vectors, bool adds) const {
    const int64_t unit = keys.begin / S.pair;
    OperandA values = E::rows_a(v, x.dv.m_ld, packed_keys, x.v_plane);
    values.data += unit * values.unit;
    E::gemm(x.o + panel * x.dv.m * S.panel, S.panel, adds, values, x.dv.m,
            {x.weights + unit * S.panel, S.panel, x.weights_plane}, vectors, keys.size() / S.pair);
  }
};

}  // namespace
}  // namespace tilewise::cpu
