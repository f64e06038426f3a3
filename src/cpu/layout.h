// The workspace of a launch. The planner and the backend lay it out with the same constructors.
#pragma once

#include "cpu/scratch.h"

namespace tilewise::cpu {

// Upper bound on query tiles over all sequences; the planner does not know the values in
// cu_seqlens.
inline int64_t query_tiles(const Problem& p, int64_t tile) {
  const int64_t rows = p.seqlen_q * group_size(p);
  return p.cu_seqlens_q == nullptr ? p.batch * ceil_div(rows, tile)
                                   : ceil_div(rows, tile) + p.batch;
}

// Whether the decode kernels serve the problem: it has few rows. A max_seqlen_q that is too small
// costs speed, not correctness. With more rows than fp32 decoding takes, and few keys, the other
// kernels are faster (32 rows: with 256 keys both take the same time, with 32 keys they take half
// as long). With batch_invariant, the keys of other sequences must not influence the choice.
// The decode kernels write no max_logits.
inline bool is_decoding(const Problem& p, Isa isa) {
  if (p.max_logits != nullptr) return false;
  if (p.batch_invariant != 0 && p.cu_seqlens_q != nullptr)
    return false;  // seqlen_q counts the rows of all sequences
  const int64_t rows =
      p.cu_seqlens_q != nullptr && p.max_seqlen_q > 0 ? p.max_seqlen_q : p.seqlen_q;
  const int max_rows = max_decode_rows(isa, dtypes_of(p).q);
  if (rows > max_rows || rows * group_size(p) > max_rows) return false;
  constexpr int64_t kMinKeys = 256;
  return rows * group_size(p) <= max_decode_rows(isa, TILEWISE_FLOAT32) || p.batch_invariant != 0 ||
         key_capacity(p) >= kMinKeys;
}

inline Shape forward_shape(const Problem& p, Isa isa) {
  return is_decoding(p, isa) ? decode_shape_of(isa, dtypes_of(p).q) : shape_of(isa, dtypes_of(p).q);
}

// Upper bound on key tiles over all sequences.
inline int64_t key_tiles(const Problem& p, int64_t tile) {
  return p.cu_seqlens_k == nullptr || p.block_table != nullptr
             ? p.batch * ceil_div(key_capacity(p), tile)
             : ceil_div(p.seqlen_k, tile) + p.batch;
}

// Packing keys once costs a copy of K and V. Packing in every work item costs that much time per
// query tile: a quarter of the forward with AMX, 5 % with bf16 dot products, nothing with fp32,
// which does not need it. With few query tiles the copy does not pay.
inline bool packs_once(const Problem& p, const Shape& shape, int64_t tile_q) {
  constexpr int64_t kQueryTiles = 3;
  const int64_t rows = p.cu_seqlens_q == nullptr ? p.seqlen_q
                       : p.max_seqlen_q > 0      ? min(p.max_seqlen_q, p.seqlen_q)
                                                 : p.seqlen_q / max(int64_t{1}, p.batch);
  return shape.pair > 1 && rows * group_size(p) >= kQueryTiles * tile_q;
}

struct ForwardLayout {
  char* scratch;  // one block per thread
  int64_t scratch_bytes;
  int64_t* first_key_tile;  // [B + 1]: key tiles before each sequence
  int64_t packed_units;     // of K and V of one key tile
  uint32_t* packed;         // [sequence][kv head][key tile]; null: work items pack their own keys
  int32_t* nonfinite;       // same shape as packed
  int64_t* first_tile;      // [B + 1]: query tiles before each sequence
  int64_t partial_rows;
  // Partial results, only with splits: [tile][kv head][split][row], where each entry of partial_out
  // has head_dim_v numbers. Where lengths decide the number of splits (`plan.rule`), sequences have
  // one tile, and [sequence] takes the place of [tile].
  float* partial_out;
  float* partial_lse;
  float* partial_low;  // the rounding error of partial_lse

  ForwardLayout(const Problem& p, const Shape& shape, const Plan& plan, Arena& arena)
      : scratch_bytes(measure(p, shape, plan.isa)),
        packed_units(packed_tile_units(shape, p)),
        partial_rows(min<int64_t>(plan.tile_q, max(int64_t{1}, p.seqlen_q * group_size(p)))) {
    scratch = arena.take<char>(Size(scratch_bytes) * plan.threads);
    first_tile = arena.take<int64_t>(p.batch + 1);
    first_key_tile = arena.take<int64_t>(p.batch + 1);
    const bool once = packs_once(p, shape, plan.tile_q);
    const Size tiles = once ? Size(key_tiles(p, shape.tile_k)) * p.heads_kv : Size(0);
    packed = once ? arena.take<uint32_t>(tiles * packed_units) : nullptr;
    nonfinite = once ? arena.take<int32_t>(tiles) : nullptr;
    const int64_t partial_tiles = plan.rule.min_keys > 0 ? p.batch : query_tiles(p, plan.tile_q);
    const Size partials =
        plan.splits == 1 ? Size(0) : Size(partial_tiles) * p.heads_kv * plan.splits * partial_rows;
    partial_out = arena.take<float>(partials * p.head_dim_v);
    partial_lse = arena.take<float>(partials);
    partial_low = arena.take<float>(partials);
  }

 private:
  static int64_t measure(const Problem& p, const Shape& shape, Isa isa) {
    Arena arena;
    if (is_decoding(p, isa))
      DecodeScratch(shape, p, arena);
    else
      ForwardScratch(shape, p, arena);
    return arena.used;
  }
};

struct JvpLayout {
  char* scratch;
  int64_t scratch_bytes;
  int64_t* first_tile;  // [B + 1]

  JvpLayout(const Problem& p, const Tangents& t, const Shape& shape, const Plan& plan, Arena& arena)
      : scratch_bytes(measure(p, t, shape)) {
    scratch = arena.take<char>(Size(scratch_bytes) * plan.threads);
    first_tile = arena.take<int64_t>(p.batch + 1);
  }

 private:
  static int64_t measure(const Problem& p, const Tangents& t, const Shape& shape) {
    Arena arena;
    JvpScratch(shape, p, t, arena);
    return arena.used;
  }
};

struct BackwardLayout {
  char* scratch;
  int64_t scratch_bytes;
  int64_t* first_tile;  // [B + 1]
  float* delta;         // [tile][kv head][lane]
  float* dsinks;        // same shape; null: not requested
  int64_t dq_tile;      // floats of dq_sum per tile
  float* dq_sum;  // [tile][kv head][panel][column][lane]; null: neither dq nor dscale is requested
  int32_t* dq_semaphores;  // [tile][kv head]
  float* dscale;           // [tile][kv head]; null: not requested
  int64_t chunk_words;
  uint64_t* chunks;  // [tile][kv head][word]: a ChunkSet each; null: no mask
  // Pass::second, in which `dscale` is null.
  float* second_delta;   // as delta
  double* chunk_dscale;  // [chunk][kv head]; null: not requested
  int64_t key_chunks;    // upper bound over all sequences, times heads_kv

  // `t` is null unless the pass is Pass::second.
  BackwardLayout(const Problem& p, const Gradients& g, const Tangents* t, const Shape& shape,
                 const Plan& plan, Arena& arena)
      : scratch_bytes(measure(p, g, t, shape)),
        dq_tile(shape.back_q * extent_of(shape, p.head_dim).m) {
    scratch = arena.take<char>(Size(scratch_bytes) * plan.threads);
    first_tile = arena.take<int64_t>(p.batch + 1);
    const Size tiles = Size(query_tiles(p, shape.back_q)) * p.heads_kv;
    delta = arena.take<float>(tiles * shape.back_q);
    dsinks = g.dsinks != nullptr ? arena.take<float>(tiles * shape.back_q) : nullptr;
    const bool second = t != nullptr;
    const bool want_dq = g.dq.data != nullptr || (g.dscale != nullptr && !second);
    dq_sum = want_dq ? arena.take<float>(tiles * dq_tile) : nullptr;
    dq_semaphores = arena.take<int32_t>(tiles);
    chunk_words = ChunkSet::words_for(ceil_div(key_capacity(p), back_chunk(shape, p)));
    chunks = p.mask != nullptr ? arena.take<uint64_t>(tiles * chunk_words) : nullptr;
    dscale = g.dscale != nullptr && !second ? arena.take<float>(tiles) : nullptr;
    second_delta = second ? arena.take<float>(tiles * shape.back_q) : nullptr;
    const Size all_chunks = Size(key_tiles(p, back_chunk(shape, p))) * p.heads_kv;
    key_chunks = all_chunks.value();
    chunk_dscale = g.dscale != nullptr && second ? arena.take<double>(all_chunks) : nullptr;
  }

 private:
  static int64_t measure(const Problem& p, const Gradients& g, const Tangents* t,
                         const Shape& shape) {
    Arena arena;
    const BackwardScratch backward(shape, p, arena);
    if (t != nullptr) SecondScratch(shape, g, *t, backward, arena);
    return arena.used;
  }
};

}  // namespace tilewise::cpu
