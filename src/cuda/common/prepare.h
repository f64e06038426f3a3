// The launch before the main kernels. It sorts the sequences for TileOrder, checks and copies index
// arrays, writes the rows and keys that no main kernel writes, and zeroes parts of the workspace.
#pragma once

#include "attention/dtypes.h"
#include "attention/online_softmax.h"
#include "cuda/params.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda::common {

inline constexpr int kPrepareThreads = 512;
inline constexpr int kPrepareWarps = kPrepareThreads / 32;
// Sequences are sorted by their number of tiles: exactly up to 31 tiles, to an eighth above.
inline constexpr int kOrderBuckets = 256;
inline constexpr int kPrepareSharedBytes = kOrderBuckets * kPrepareWarps * 4 + kPrepareWarps * 4;

// TileOrder::table for tiles of `tile` packed rows of `group` heads, or of `tile` keys.
struct OrderTask {
  enum class Counts : int32_t { rows, keys };

  TileOrder::Entry* table = nullptr;  // [batch + 1]; null: no table
  Counts counts = Counts::rows;
  int32_t tile = 1;
  int32_t group = 1;  // query heads packed into a tile of rows
};

// Checked copies of index arrays for the kernels that follow, which lay out their sums by sequence
// and must agree on where each sequence lies. Null: no copy. Lengths are copied only for a backward
// pass.
//
// If a cu_seqlens decreases or exceeds its tensor, nothing is known about any sequence, and its
// copy is all 0. In a backward a sequence with any other invalid entry gets no rows and no keys in
// the copies, and its gradients become NaN here.
struct IndexCopies {
  int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  int32_t* cu_seqlens_k = nullptr;
  int32_t* seqused_q = nullptr;  // [batch]
  int32_t* seqused_k = nullptr;

  TILEWISE_FN bool any() const { return cu_seqlens_q != nullptr || seqused_q != nullptr; }
  TILEWISE_FN bool of_backward() const { return seqused_q != nullptr; }

  // In a paged cache cu_seqlens_k gives lengths only, and the copy of seqused_k has these.
  static bool copies_key_layout(const Problem& p) {
    return p.cu_seqlens_k != nullptr && p.block_table == nullptr;
  }

  // Number of int32 that the copies need.
  static int64_t entries_of_forward(const Problem& p) {
    return p.cu_seqlens_q != nullptr ? p.batch + 1 : 0;
  }
  static int64_t entries_of_backward(const Problem& p) {
    if (has_uniform_sequences(p)) return 0;
    const int64_t layouts = (p.cu_seqlens_q != nullptr ? 1 : 0) + (copies_key_layout(p) ? 1 : 0);
    return layouts * (p.batch + 1) + 2 * p.batch;
  }
  static IndexCopies forward(const Problem& p, int32_t* memory) {
    IndexCopies copies;
    if (p.cu_seqlens_q != nullptr) copies.cu_seqlens_q = memory;
    return copies;
  }
  static IndexCopies backward(const Problem& p, int32_t* memory) {
    IndexCopies copies;
    if (has_uniform_sequences(p)) return copies;
    const auto take = [&](int64_t count) {
      int32_t* const taken = memory;
      memory += count;
      return taken;
    };
    if (p.cu_seqlens_q != nullptr) copies.cu_seqlens_q = take(p.batch + 1);
    if (copies_key_layout(p)) copies.cu_seqlens_k = take(p.batch + 1);
    copies.seqused_q = take(p.batch);
    copies.seqused_k = take(p.batch);
    return copies;
  }

  // The problem with the copies in place of the arrays.
  Problem applied(Problem p) const {
    if (cu_seqlens_q != nullptr) p.cu_seqlens_q = cu_seqlens_q;
    if (cu_seqlens_k != nullptr) p.cu_seqlens_k = cu_seqlens_k;
    if (seqused_q != nullptr) p.seqused_q = seqused_q;
    if (seqused_k != nullptr) p.seqused_k = seqused_k;
    return p;
  }
};

// Rows or keys of `view` that are not in use become 0. Null data: nothing to clear.
struct ClearTask {
  tilewise_tensor view{};
  int64_t heads = 0;
  int64_t columns = 0;
  int32_t dtype = 0;
};

// Memory to fill with copies of a 32-bit word; bytes is a multiple of 4. Null data: none.
struct FillTask {
  void* data = nullptr;
  int64_t bytes = 0;
  uint32_t word = 0;
};

struct PrepareParams {
  Problem problem{};
  Problem checked_problem{};  // `problem` with `index_copies` in place of the arrays
  Gradients gradients{};      // backward: the extents of dbias
  IndexCopies index_copies;
  IndexRecord* index_record = nullptr;
  OrderTask order;
  ClearTask rows;  // out, its tangent or dq
  // They become `unused_lse` and 0 in rows that are not in use; lse_low has the strides of lse.
  float* lse = nullptr;
  float* lse_low = nullptr;
  int64_t lse_stride_batch = 0;
  int64_t lse_stride_head = 0;
  float unused_lse = kMinusInfinity;
  ClearTask keys[2];  // dk, dv
  FillTask fills[4];
  int32_t clear_blocks = 0;  // set by `set_grid`
};

// Whether q may have rows that no sequence uses; only the GPU knows whether it does.
inline bool may_have_unused_rows(const Problem& p) {
  return p.seqused_q != nullptr || p.cu_seqlens_q != nullptr;
}
inline bool may_have_unused_keys(const Problem& p) {
  return p.seqused_k != nullptr || p.leftpad_k != nullptr || p.cu_seqlens_k != nullptr ||
         (!keys_per_sequence(p) && p.kv_batch != p.batch);
}
// Rows of dk and dv over all sequences.
TILEWISE_FN int64_t gradient_keys(const Problem& p) {
  if (keys_per_sequence(p)) return p.batch * key_capacity(p);
  return p.cu_seqlens_k != nullptr ? p.seqlen_k : p.kv_batch * p.seqlen_k;
}

// The clearing that a forward needs; the caller adds `order` and the first of `fills`.
inline PrepareParams prepare_forward(const Problem& p) {
  PrepareParams params;
  params.problem = p;
  if (p.max_logits != nullptr) {
    constexpr uint32_t kMinusInfinityBits = 0xff800000u;
    params.fills[1] = {p.max_logits, p.batch * p.heads_q * 4, kMinusInfinityBits};
  }
  if (!may_have_unused_rows(p)) return params;
  params.rows = {p.out, p.heads_q, p.head_dim_v, dtypes_of(p).out};
  params.lse = p.lse;
  params.lse_low = p.lse_low;
  params.lse_stride_batch = p.lse_stride_batch;
  params.lse_stride_head = p.lse_stride_head;
  return params;
}

// A jvp clears likewise: the tangents of rows that are not in use become 0.
inline PrepareParams prepare_jvp(const Problem& p, const Tangents& t) {
  PrepareParams params;
  params.problem = p;
  if (!may_have_unused_rows(p)) return params;
  params.rows = {t.out, p.heads_q, p.head_dim_v, dtypes_of(p).out};
  params.lse = t.lse;
  params.lse_stride_batch = t.lse_stride_batch;
  params.lse_stride_head = t.lse_stride_head;
  params.unused_lse = 0.0f;
  return params;
}

inline PrepareParams prepare_backward(const Problem& p, const Gradients& g) {
  PrepareParams params;
  params.problem = p;
  params.gradients = g;
  // Any index array may have an invalid entry: the gradients that it concerns then become NaN.
  const bool has_arrays = !has_uniform_sequences(p);
  const Dtypes dtypes = dtypes_of(p);
  if (has_arrays) params.rows = {g.dq, p.heads_q, p.head_dim, dtypes.q};
  if (has_arrays || may_have_unused_keys(p)) {
    params.keys[0] = {g.dk, p.heads_kv, p.head_dim, dtypes.kv};
    params.keys[1] = {g.dv, p.heads_kv, p.head_dim_v, dtypes.kv};
  }
  return params;
}

// Whether CTA 0 has its own tasks, `index_copies` and `order`, instead of clearing.
TILEWISE_FN bool has_first_block(const PrepareParams& params) {
  return params.order.table != nullptr || params.index_copies.any();
}

// Adds the copies of index arrays. Call it after one of the functions above.
inline void set_index_copies(PrepareParams& params, const IndexCopies& copies,
                             IndexRecord* record) {
  params.index_copies = copies;
  params.checked_problem = copies.applied(params.problem);
  params.index_record = record;
}

// Sets clear_blocks and returns the number of CTAs of the launch; 0: there is nothing to do. Call
// it last.
inline int64_t set_grid(PrepareParams& params) {
  constexpr int64_t kMaxBlocks = 512;
  const Problem& p = params.problem;
  int64_t warps = 0;
  if (params.rows.view.data != nullptr || params.lse != nullptr)
    warps += ceil_div(total_rows(p), 32);
  if (params.keys[0].view.data != nullptr || params.keys[1].view.data != nullptr)
    warps += ceil_div(gradient_keys(p), 32);
  for (const FillTask& fill : params.fills)
    if (fill.data != nullptr) warps += ceil_div(fill.bytes, 4096);
  const int64_t blocks = min(kMaxBlocks, ceil_div(warps, kPrepareWarps));
  params.clear_blocks = static_cast<int32_t>(blocks);
  return blocks + (has_first_block(params) ? 1 : 0);
}

// prepare.cuh: prepare(PrepareParams)

}  // namespace tilewise::cuda::common
