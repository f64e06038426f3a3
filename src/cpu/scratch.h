// Scratch memory of the work items. One constructor defines the layout: the planner runs it on a
// null base to measure, and the kernels run it on their memory. Plain code, compiled for every
// instruction set.
#pragma once

#include "attention/mask.h"
#include "base/float8.h"
#include "base/size.h"
#include "cpu/shape.h"

namespace tilewise::cpu {

// Hands out memory front to back, 64-byte aligned. With a null base it only measures.
struct Arena {
  char* base = nullptr;
  int64_t used = 0;

  // For sizes of a tile. Work items call this as well; with `Size`, small ones would spend 2 % of
  // their time here.
  template <class T>
  TILEWISE_FN T* take(int64_t count) {
    T* const result = at<T>();
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return result;
  }
  // For sizes that are products of the caller's numbers.
  template <class T>
  TILEWISE_FN T* take(Size count) {
    T* const result = at<T>();
    const Size bytes = count * static_cast<int64_t>(sizeof(T));
    used = (Size(used) + round_up(bytes.value(), 64)).value();
    return result;
  }

 private:
  template <class T>
  TILEWISE_FN T* at() const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(used));
  }
};

struct LaneScratch {
  int64_t* begin;  // keys [begin, end) are visible to the lane
  int64_t* end;
  int64_t* row;
  int64_t* head;  // query head
  Range* any;     // per panel: keys that some lane sees
  Range* all;     // per panel: keys that every lane sees

  TILEWISE_FN LaneScratch(const Shape& s, int64_t lanes, Arena& arena)
      : begin(arena.take<int64_t>(lanes)),
        end(arena.take<int64_t>(lanes)),
        row(arena.take<int64_t>(lanes)),
        head(arena.take<int64_t>(lanes)),
        any(arena.take<Range>(lanes / s.panel)),
        all(arena.take<Range>(lanes / s.panel)) {}
};

struct ScoreScratch {
  int64_t ld;    // lanes
  float* bias;   // [key][lane]; null: no bias
  float* slope;  // [lane]

  TILEWISE_FN ScoreScratch(const Problem& p, int64_t keys, int64_t lanes, Arena& arena)
      : ld(lanes),
        bias(p.bias != nullptr ? arena.take<float>(keys * lanes) : nullptr),
        slope(arena.take<float>(lanes)) {}
};

// The chunks of keys that a mask and the band show a query tile, one bit each.
struct ChunkSet {
  uint64_t* words;

  TILEWISE_FN static int64_t words_for(int64_t chunks) { return ceil_div(chunks, 64); }
  TILEWISE_FN void insert(int64_t i) const { words[i / 64] |= uint64_t{1} << (i % 64); }
  TILEWISE_FN bool contains(int64_t i) const { return (words[i / 64] >> (i % 64) & 1) != 0; }
  TILEWISE_FN int32_t count_below(int64_t i) const {
    int32_t count = 0;
    for (int64_t word = 0; word < i / 64; ++word) count += __builtin_popcountll(words[word]);
    const uint64_t below = (uint64_t{1} << (i % 64)) - 1;
    return count + __builtin_popcountll(words[i / 64] & below);
  }
};

// The rectangles among which a work item looks for those that it touches.
TILEWISE_FN int64_t mask_rectangles(const Problem& p) {
  const bool has_ranges = p.mask != nullptr && p.mask->kind == TILEWISE_MASK_RANGES;
  return has_ranges ? p.mask->entry_count : 0;
}

// Empty without a mask.
struct MaskScratch {
  int64_t ld;         // lanes
  int32_t* ranges;    // of the mask that touch the work item
  uint32_t* bits;     // [word][lane]: the keys of a tile that a lane sees
  uint8_t* coverage;  // [key tile][panel]: of the walk

  TILEWISE_FN MaskScratch(const Problem& p, int64_t tile_k, int64_t lanes, Size coverages,
                          Arena& arena)
      : ld(lanes),
        ranges(arena.take<int32_t>(Size(mask_rectangles(p)))),
        bits(arena.take<uint32_t>(p.mask != nullptr ? tile_k / kMaskWord * lanes : 0)),
        coverage(arena.take<uint8_t>(p.mask != nullptr ? coverages : Size(0))) {}
};

// How the stored lse turns the scores of each lane into weights; see generic/row_weights.h.
struct WeightScratch {
  int32_t* huge;  // -1 where S is multiplied by the scale first
  float* base;    // P = 2^((S - base) c - rest)
  float* c;
  float* rest;
  int32_t* single_key;  // -1 where the row sees exactly one key

  TILEWISE_FN WeightScratch(int64_t lanes, Arena& arena)
      : huge(arena.take<int32_t>(lanes)),
        base(arena.take<float>(lanes)),
        c(arena.take<float>(lanes)),
        rest(arena.take<float>(lanes)),
        single_key(arena.take<int32_t>(lanes)) {}
};

// Rows with Inf or NaN that were removed from a packed operand.
struct RowScratch {
  const void** address;
  int32_t* index;

  TILEWISE_FN RowScratch(int64_t rows, Arena& arena)
      : address(arena.take<const void*>(rows)), index(arena.take<int32_t>(rows)) {}
};

// Units of K and V of one packed key tile.
TILEWISE_FN int64_t packed_tile_units(const Shape& s, const Problem& p) {
  return s.parts * (s.tile_k * extent_of(s, p.head_dim).ld +
                    s.tile_k / s.pair * extent_of(s, p.head_dim_v).m_ld);
}

// Rows of a float8_e4m3 key tile, converted to the dtype of q; empty for other caches.
struct WideScratch {
  int64_t ld;
  uint16_t* rows;
  const Float8** from;

  TILEWISE_FN WideScratch(const Problem& p, int64_t keys, int64_t columns, Arena& arena)
      : ld(round_up(columns, 32)),
        rows(arena.take<uint16_t>(p.kv_float8 != 0 ? keys * ld : 0)),
        from(arena.take<const Float8*>(p.kv_float8 != 0 ? keys : 0)) {}
};

// Where weights are rounded for the product with V, an out in fp32 is divided by the sum of the
// rounded weights. A row whose weight is nearly all on one key then has the value of that key, not
// one that is off by the rounding, and delta of the backward cancels against dP of that key. An out
// of 16 bits would gain little, because it is rounded as much itself.
TILEWISE_FN bool divides_by_rounded_sum(const Problem& p) {
  return dtypes_of(p).out == TILEWISE_FLOAT32;
}

struct ForwardScratch {
  Extent qk;       // of head_dim
  Extent dv;       // of head_dim_v
  int64_t panels;  // per full work item
  // Units of one part of a packed operand; the next part follows it (Shape::parts).
  int64_t q_plane, k_plane, v_plane, weights_plane;
  LaneScratch lanes;
  ScoreScratch scores;
  uint32_t* q;             // [panel][unit][lane]
  uint32_t* k;             // [key][unit]
  uint32_t* v;             // in the engine's layout, with the contraction over keys
  float* s_tile;           // S^T of one panel and strip: [key][lane]
  uint32_t* weights;       // P^T in the engine's layout; fp32 engines: s_tile
  float* o;                // [panel][dv][lane]
  float* m;                // [lane], in the units of S
  float* l;                // [lane]
  float* rounding;         // [lane]: the rounding errors of the weights in l; null: not wanted
  bool* huge;              // [lane]: whether the row has to be computed again
  float* max_logits;       // [lane]: of the keys so far; null: not wanted
  const void** rows;       // addresses being packed
  const void** next_rows;  // of keys and values of the next tile
  RowScratch nonfinite_v;
  WideScratch wide_k, wide_v;
  MaskScratch mask;

  TILEWISE_FN ForwardScratch(const Shape& s, const Problem& p, Arena& arena)
      : qk(extent_of(s, p.head_dim)),
        dv(extent_of(s, p.head_dim_v)),
        panels(ceil_div(s.large_tile_q, s.panel)),
        q_plane(panels * qk.units * s.panel),
        k_plane(s.tile_k * qk.ld),
        v_plane(s.tile_k / s.pair * dv.m_ld),
        weights_plane(s.tile_k / s.pair * s.panel),
        lanes(s, panels * s.panel, arena),
        scores(p, s.tile_k, s.panel, arena),
        q(arena.take<uint32_t>(s.parts * q_plane)),
        k(arena.take<uint32_t>(s.parts * k_plane)),
        v(arena.take<uint32_t>(s.parts * v_plane)),
        s_tile(arena.take<float>(s.strip * s.panel)),
        weights(s.pair == 1 ? reinterpret_cast<uint32_t*>(s_tile)
                            : arena.take<uint32_t>(s.parts * weights_plane)),
        o(arena.take<float>(panels * dv.m * s.panel)),
        m(arena.take<float>(panels * s.panel)),
        l(arena.take<float>(panels * s.panel)),
        rounding(s.pair > 1 && divides_by_rounded_sum(p) ? arena.take<float>(panels * s.panel)
                                                         : nullptr),
        huge(arena.take<bool>(panels * s.panel)),
        max_logits(p.max_logits != nullptr ? arena.take<float>(panels * s.panel) : nullptr),
        rows(arena.take<const void*>(max<int64_t>(panels * s.panel, s.tile_k))),
        next_rows(arena.take<const void*>(2 * s.tile_k)),
        nonfinite_v(s.tile_k, arena),
        wide_k(p, s.tile_k, p.head_dim, arena),
        wide_v(p, s.tile_k, p.head_dim_v, arena),
        mask(p, s.tile_k, s.panel, Size(ceil_div(key_capacity(p), s.tile_k)) * panels, arena) {}
};

// The scratch memory of decoding; see generic/decode.h.
struct DecodeScratch {
  int64_t tile_k;
  int64_t o_ld;
  LaneScratch lanes;
  float* q;         // [row][column], in the layout of the reads of K
  float* s_tile;    // [row][key]
  float* o;         // [row][column], in the order of the reads of V
  float* m;         // [row], in the units of S
  float* l;         // [row][lane]: sums of every W-th key
  float* rounding;  // [row][lane]: the rounding errors of the weights in l; null: not wanted
  bool* huge;       // [row]: whether the row has to be computed again
  const void** rows;
  WideScratch wide_k, wide_v;
  MaskScratch mask;

  TILEWISE_FN DecodeScratch(const Shape& s, const Problem& p, Arena& arena)
      : tile_k(s.tile_k),
        o_ld(round_up(p.head_dim_v, 8 * s.lanes)),
        lanes(s, s.panel, arena),
        q(arena.take<float>(kDecodeRows * round_up(p.head_dim, 2 * s.lanes))),
        s_tile(arena.take<float>(kDecodeRows * tile_k)),
        o(arena.take<float>(kDecodeRows * o_ld)),
        m(arena.take<float>(kDecodeRows)),
        l(arena.take<float>(kDecodeRows * s.lanes)),
        rounding(divides_by_rounded_sum(p) && dtypes_of(p).q == TILEWISE_BFLOAT16
                     ? arena.take<float>(kDecodeRows * s.lanes)
                     : nullptr),
        huge(arena.take<bool>(kDecodeRows)),
        rows(arena.take<const void*>(4 * tile_k)),
        wide_k(p, s.tile_k, p.head_dim, arena),
        wide_v(p, s.tile_k, p.head_dim_v, arena),
        mask(p, s.tile_k, 1, Size(ceil_div(key_capacity(p), s.tile_k)), arena) {}
};

// The tangent of the bias: [key][lane]; null if it has none.
struct BiasTangentScratch {
  int64_t ld;
  float* bias;

  TILEWISE_FN BiasTangentScratch(const Tangents& t, int64_t keys, int64_t lanes, Arena& arena)
      : ld(lanes), bias(t.bias != nullptr ? arena.take<float>(keys * lanes) : nullptr) {}
};

// Memory for an operand of a tensor that may be absent; null without it.
TILEWISE_FN uint32_t* taken_if(const tilewise_tensor& view, int64_t units, Arena& arena) {
  return view.data != nullptr ? arena.take<uint32_t>(units) : nullptr;
}

// The scratch memory of tangents; see generic/jvp.h.
struct JvpScratch {
  Extent qk;
  Extent dv;       // of head_dim_v
  int64_t panels;  // per full work item
  int64_t q_plane, k_plane, v_plane, weights_plane;
  LaneScratch lanes;
  ScoreScratch scores;
  WeightScratch weights;
  BiasTangentScratch bias_tangent;
  uint32_t* q;          // [panel][unit][lane]
  uint32_t* q_tangent;  // the same; null: it is 0, as for k and v
  uint32_t* k;          // [key][unit]
  uint32_t* k_tangent;
  uint32_t* v;  // in the engine's layout, with the contraction over keys
  uint32_t* v_tangent;
  float* s_tile;           // S^T of one panel: [key][lane]
  float* x_tile;           // the tangent of the products q.k
  uint32_t* p_b;           // P^T, contraction over keys; fp32 engines: s_tile
  uint32_t* w_b;           // W^T; fp32 engines: x_tile
  float* o;                // [panel][dv][lane]
  float* reference;        // [lane]: what is subtracted from the tangents of the scores
  int32_t* has_reference;  // [lane]: -1 once a tile has given it
  float* mean;             // [lane]: sum of P (s' - reference)
  const void** rows;
  RowScratch nonfinite_v, nonfinite_v_tangent;
  MaskScratch mask;

  TILEWISE_FN JvpScratch(const Shape& s, const Problem& p, const Tangents& t, Arena& arena)
      : qk(extent_of(s, p.head_dim)),
        dv(extent_of(s, p.head_dim_v)),
        panels(ceil_div(s.tile_q, s.panel)),
        q_plane(panels * qk.units * s.panel),
        k_plane(s.strip * qk.ld),
        v_plane(s.strip / s.pair * dv.m_ld),
        weights_plane(s.strip / s.pair * s.panel),
        lanes(s, panels * s.panel, arena),
        scores(p, s.strip, s.panel, arena),
        weights(panels * s.panel, arena),
        bias_tangent(t, s.strip, s.panel, arena),
        q(arena.take<uint32_t>(s.parts * q_plane)),
        q_tangent(taken_if(t.q, s.parts * q_plane, arena)),
        k(arena.take<uint32_t>(s.parts * k_plane)),
        k_tangent(taken_if(t.k, s.parts * k_plane, arena)),
        v(arena.take<uint32_t>(s.parts * v_plane)),
        v_tangent(taken_if(t.v, s.parts * v_plane, arena)),
        s_tile(arena.take<float>(s.strip * s.panel)),
        x_tile(arena.take<float>(s.strip * s.panel)),
        p_b(weights_of(s, s_tile, arena)),
        w_b(weights_of(s, x_tile, arena)),
        o(arena.take<float>(panels * dv.m * s.panel)),
        reference(arena.take<float>(panels * s.panel)),
        has_reference(arena.take<int32_t>(panels * s.panel)),
        mean(arena.take<float>(panels * s.panel)),
        rows(arena.take<const void*>(max<int64_t>(panels * s.panel, s.strip))),
        nonfinite_v(s.strip, arena),
        nonfinite_v_tangent(s.strip, arena),
        mask(p, s.strip, s.panel, Size(ceil_div(key_capacity(p), s.strip)) * panels, arena) {}

 private:
  TILEWISE_FN uint32_t* weights_of(const Shape& s, float* fp32, Arena& arena) const {
    return s.pair == 1 ? reinterpret_cast<uint32_t*>(fp32)
                       : arena.take<uint32_t>(s.parts * weights_plane);
  }
};

struct BackwardScratch {
  Extent qk;
  Extent dve;      // of head_dim_v
  int64_t chunk;   // keys of a full work item
  int64_t panels;  // panels of a full query tile
  int64_t k_plane, v_plane, k_t_plane, q_t_plane, do_t_plane, q_rows_plane, do_rows_plane;
  int64_t weights_plane;
  LaneScratch lanes;
  ScoreScratch scores;
  uint32_t* k;        // [key][unit of head_dim]
  uint32_t* v;        // [key][unit of head_dim_v]
  uint32_t* k_t;      // K per key tile, in the engine's layout, with the contraction over keys
  float* dk;          // [key][column]
  float* dv;          // [key][column]
  uint32_t* q_t;      // [panel][unit][lane]
  uint32_t* do_t;     // [panel][unit][lane]
  uint32_t* q_rows;   // [lane / pair][column]
  uint32_t* do_rows;  // [lane / pair][column]
  float* s_tile;      // S^T: [key][lane], of one panel unless the engine is fp32
  float* dp_tile;     // dP^T: [key][lane]
  uint32_t* p_a;      // P^T, contraction over lanes; fp32 engines: s_tile
  uint32_t* ds_a;     // dS^T, contraction over lanes; fp32 engines: dp_tile
  uint32_t* ds_b;     // dS^T, contraction over keys; fp32 engines: dp_tile
  float* dq;          // [panel][column][lane]
  WeightScratch weights;
  float* delta;  // [lane]
  float* dlse;   // [lane]
  const void** rows;
  RowScratch nonfinite_k, nonfinite_q, nonfinite_do;
  MaskScratch mask;          // of the keys of the work item
  MaskScratch mask_of_rows;  // of the rows of the query tile

  TILEWISE_FN BackwardScratch(const Shape& s, const Problem& p, Arena& arena)
      : qk(extent_of(s, p.head_dim)),
        dve(extent_of(s, p.head_dim_v)),
        chunk(back_chunk(s, p)),
        panels(s.back_q / s.panel),
        k_plane(chunk * qk.ld),
        v_plane(chunk * dve.ld),
        k_t_plane(kBackTileK / s.pair * qk.m_ld),
        q_t_plane(panels * qk.units * s.panel),
        do_t_plane(panels * dve.units * s.panel),
        q_rows_plane(s.back_q / s.pair * qk.n_ld),
        do_rows_plane(s.back_q / s.pair * dve.n_ld),
        weights_plane(kBackTileK * s.back_q / s.pair),
        lanes(s, s.back_q, arena),
        scores(p, kBackTileK, s.back_q, arena),
        k(arena.take<uint32_t>(s.parts * k_plane)),
        v(arena.take<uint32_t>(s.parts * v_plane)),
        k_t(arena.take<uint32_t>(chunk / kBackTileK * s.parts * k_t_plane)),
        dk(arena.take<float>(chunk * qk.n_ld)),
        dv(arena.take<float>(chunk * dve.n_ld)),
        q_t(arena.take<uint32_t>(s.parts * q_t_plane)),
        do_t(arena.take<uint32_t>(s.parts * do_t_plane)),
        q_rows(arena.take<uint32_t>(s.parts * q_rows_plane)),
        do_rows(arena.take<uint32_t>(s.parts * do_rows_plane)),
        s_tile(arena.take<float>(kBackTileK * (s.pair == 1 ? s.back_q : s.panel))),
        dp_tile(arena.take<float>(kBackTileK * (s.pair == 1 ? s.back_q : s.panel))),
        p_a(weights_of(s, s_tile, arena)),
        ds_a(weights_of(s, dp_tile, arena)),
        ds_b(weights_of(s, dp_tile, arena)),
        dq(arena.take<float>(panels * qk.m * s.panel)),
        weights(s.back_q, arena),
        delta(arena.take<float>(s.back_q)),
        dlse(arena.take<float>(s.back_q)),
        rows(arena.take<const void*>(max<int64_t>(s.back_q, chunk))),
        nonfinite_k(chunk, arena),
        nonfinite_q(s.back_q, arena),
        nonfinite_do(s.back_q, arena),
        mask(p, kBackTileK, s.back_q, Size(0), arena),
        mask_of_rows(p, 0, 0, Size(0), arena) {}

  // Weights share the memory of fp32 scores where the engine is fp32.
  TILEWISE_FN uint32_t* weights_of(const Shape& s, float* fp32, Arena& arena) const {
    return s.pair == 1 ? reinterpret_cast<uint32_t*>(fp32)
                       : arena.take<uint32_t>(s.parts * weights_plane);
  }
};

// What Pass::second adds to the scratch memory of a backward, in which dout is the gradient of the
// tangent of out; see generic/second.h. Operands of tensors that are absent are null.
struct SecondScratch {
  BiasTangentScratch bias_tangent;
  uint32_t* k;        // K': as k, v and k_t of BackwardScratch
  uint32_t* v;        // V'
  uint32_t* k_t;      // K'
  uint32_t* q_t;      // Q': as q_t, do_t, q_rows and do_rows
  uint32_t* do_t;     // the gradient of out
  uint32_t* q_rows;   // Q'
  uint32_t* do_rows;  // the gradient of out
  float* x_tile;      // x'^T, the tangents of the products x = q.k
  float* d_tile;      // (dout.v + dout'.v')^T; dp_tile of BackwardScratch has (dout'.v)^T
  uint32_t* p_a;      // P^T; fp32 engines: x_tile
  uint32_t* ds_a;     // dX'^T, the gradient of x'; fp32 engines: d_tile
  uint32_t* ds_b;
  float* delta;  // [lane]
  float* dlse;   // [lane]
  float* mean;   // [lane]: the tangent of lse
  RowScratch nonfinite_k, nonfinite_q, nonfinite_do;

  TILEWISE_FN SecondScratch(const Shape& s, const Gradients& g, const Tangents& t,
                            const BackwardScratch& b, Arena& arena)
      : bias_tangent(t, kBackTileK, s.back_q, arena),
        k(taken_if(t.k, s.parts * b.k_plane, arena)),
        v(taken_if(t.v, s.parts * b.v_plane, arena)),
        k_t(taken_if(t.k, b.chunk / kBackTileK * s.parts * b.k_t_plane, arena)),
        q_t(taken_if(t.q, s.parts * b.q_t_plane, arena)),
        do_t(taken_if(g.dout, s.parts * b.do_t_plane, arena)),
        q_rows(taken_if(t.q, s.parts * b.q_rows_plane, arena)),
        do_rows(taken_if(g.dout, s.parts * b.do_rows_plane, arena)),
        x_tile(arena.take<float>(kBackTileK * (s.pair == 1 ? s.back_q : s.panel))),
        d_tile(arena.take<float>(kBackTileK * (s.pair == 1 ? s.back_q : s.panel))),
        p_a(b.weights_of(s, x_tile, arena)),
        ds_a(b.weights_of(s, d_tile, arena)),
        ds_b(b.weights_of(s, d_tile, arena)),
        delta(arena.take<float>(s.back_q)),
        dlse(arena.take<float>(s.back_q)),
        mean(arena.take<float>(s.back_q)),
        nonfinite_k(b.chunk, arena),
        nonfinite_q(s.back_q, arena),
        nonfinite_do(s.back_q, arena) {}
};

}  // namespace tilewise::cpu
