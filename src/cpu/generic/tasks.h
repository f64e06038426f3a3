// The interface between the common code and the kernels of an instruction set.
#pragma once

#include "cpu/scratch.h"

namespace tilewise::cpu {

// One forward work item: packed query rows of one key/value head (in decoding: of `heads` heads
// from it on) over a range of keys.
struct ForwardTask {
  const Problem* problem;
  Sequence sequence;
  int64_t kv_head;
  int64_t heads;
  Range packed_rows;
  Range keys;
  bool first_split;  // whether this split carries the sink
  Core core;         // decoding: chooses the prefetch scheme
  // If null, out and lse are written. Otherwise the partial result of this split: normalised
  // [row][head_dim_v], its lse and its lse_low.
  float* partial_out;
  float* partial_lse;
  float* partial_low;
  int64_t partial_stride;  // rows from one head to the next
  // Null, or the packed key tiles of this head: see PackTask.
  const uint32_t* packed;
  const int32_t* nonfinite;
};

// K and V of one key tile in the layout of the matrix engine, packed once if many query tiles read
// them.
struct PackTask {
  const Problem* problem;
  Sequence sequence;
  int64_t kv_head;
  Range keys;
  uint32_t* packed;    // K, then V
  int32_t* nonfinite;  // whether V has Inf or NaN
};

// One work item of the tangents: packed query rows of one key/value head.
struct JvpTask {
  const Problem* problem;
  const Tangents* tangents;
  Sequence sequence;
  int64_t kv_head;
  Range packed_rows;
};

// The gradients that a backward starts from: those of out and lse, or, in Pass::second, those of
// their tangents.
struct Incoming {
  tilewise_tensor dout;
  const float* dlse;  // null: 0
  int64_t dlse_stride_batch;
  int64_t dlse_stride_head;

  template <class Struct>
  static Incoming of(const Struct& from) {
    return {from.dout, from.dlse, from.dlse_stride_batch, from.dlse_stride_head};
  }
  TILEWISE_FN float dlse_at(const Sequence& s, int64_t row, int64_t head) const {
    if (dlse == nullptr) return 0.0f;
    return dlse[s.lse_offset(dlse_stride_batch, row) + head * dlse_stride_head];
  }
};

// One backward work item: a chunk of keys of one key/value head, over all query tiles that see it.
struct BackwardTask {
  const Problem* problem;
  const Gradients* gradients;
  const Tangents* tangents;  // null unless the pass is Pass::second, as are the fields for it
  Incoming incoming;
  Sequence sequence;
  int64_t kv_head;
  Range keys;
  int64_t chunk;
  // Per query tile of this sequence and head, tile_stride entries apart.
  float* dq_sum;       // [panel][head_dim][lane]: dq summed over keys, unscaled; null: not wanted
  const float* delta;  // [lane]: do.o - dlse
  const float* second_delta;  // [lane]: do.o - dlse of the results, not of their tangents
  int32_t* dq_semaphores;     // number of chunks added to dq_sum so far
  int64_t tile_stride = 1;
  uint64_t* chunks = nullptr;  // [word] of a ChunkSet; null without a mask (the band decides)
  int64_t chunk_words = 0;
  double* dscale;  // Pass::second: the contribution of this item; null: not wanted
};

// One query tile of the row-wise passes: delta, dq, and the contributions to dsinks and dscale.
struct RowTask {
  const Problem* problem;
  const Gradients* gradients;
  const Tangents* tangents;  // null unless the pass is Pass::second
  Incoming incoming;
  Sequence sequence;
  int64_t kv_head;
  Range packed_rows;
  float* delta;         // [lane]
  float* second_delta;  // [lane]: Pass::second
  float* dsinks;        // [lane]: contribution of this row; null: not wanted
  const float* dq_sum;  // null: no chunk saw this tile
  float* dscale;        // one float: contribution of this tile; null: not wanted
};

struct Kernels {
  void (*pack)(const PackTask&, Arena scratch);
  void (*forward)(const ForwardTask&, Arena scratch);
  void (*decode)(const ForwardTask&, Arena scratch);  // at most max_decode_rows packed rows
  // Combines the partial results of `splits` splits, `stride` rows apart, into out and lse.
  void (*combine)(const ForwardTask&, int64_t splits, int64_t stride);
  void (*delta)(const RowTask&);
  void (*backward)(const BackwardTask&, Arena scratch);
  void (*finish_dq)(const RowTask&);
  void (*jvp)(const JvpTask&, Arena scratch);
  void (*second_rows)(const RowTask&);
  void (*second)(const BackwardTask&, Arena scratch);
};

// The kernels of an instruction set for a dtype of q, each defined in
// src/cpu/isa/<set>/<dtype>.cpp; a build may leave instruction sets out.
const Kernels* portable_float32();
const Kernels* portable_float16();
const Kernels* portable_bfloat16();
const Kernels* neon_float32();
const Kernels* neon_float16();
const Kernels* neon_bfloat16();
const Kernels* neon_bf16_bfloat16();
const Kernels* avx2_float32();
const Kernels* avx2_float16();
const Kernels* avx2_bfloat16();
const Kernels* avx512_float32();
const Kernels* avx512_float16();
const Kernels* avx512_bfloat16();
const Kernels* avx512_bf16_bfloat16();
const Kernels* amx_float16();
const Kernels* amx_bfloat16();

}  // namespace tilewise::cpu
