// What goes before the main kernels, in one launch: the order of the sequences, what no main kernel
// writes, and zeros in the workspace.
#pragma once

#include "cuda/params.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda::common {

inline constexpr int kPrepareThreads = 512;
inline constexpr int kPrepareWarps = kPrepareThreads / 32;
// Sequences are sorted by their number of tiles, exact up to 31 and to an eighth above.
inline constexpr int kOrderBuckets = 256;
inline constexpr int kPrepareSharedBytes = kOrderBuckets * kPrepareWarps * 4 + kPrepareWarps * 4;

// TileOrder::table of `tile` packed rows of `group` heads, or of `tile` keys.
struct OrderTask {
  enum class Of : int32_t { rows, keys };

  TileOrder::Entry* table = nullptr;  // [batch + 1]; null: not wanted
  Of of = Of::rows;
  int32_t tile = 1;
  int32_t group = 1;  // heads packed into a tile of rows
};

// Copies of index arrays for the kernels that follow, which lay out sums by sequences and have to
// agree about where these are. Null: not wanted; those of lengths are for a backward.
//
// A cu_seqlens that falls, or leaves its rows, says nothing reliable about any sequence: its copy
// is all 0. In a backward a sequence of which some entry does not fit has no rows and no keys. The
// gradients of its own become NaN here.
struct FitTask {
  int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  int32_t* cu_seqlens_k = nullptr;
  int32_t* seqused_q = nullptr;  // [batch]
  int32_t* seqused_k = nullptr;

  TILEWISE_FN bool any() const { return cu_seqlens_q != nullptr || seqused_q != nullptr; }
  TILEWISE_FN bool of_backward() const { return seqused_q != nullptr; }

  // With pages the entries only say how long sequences are, as the copy of seqused_k does.
  static bool copies_key_layout(const Problem& p) {
    return p.cu_seqlens_k != nullptr && p.block_table == nullptr;
  }

  // How many int32 the copies take.
  static int64_t entries_of_forward(const Problem& p) {
    return p.cu_seqlens_q != nullptr ? p.batch + 1 : 0;
  }
  static int64_t entries_of_backward(const Problem& p) {
    if (has_uniform_sequences(p)) return 0;
    const int64_t layouts = (p.cu_seqlens_q != nullptr ? 1 : 0) + (copies_key_layout(p) ? 1 : 0);
    return layouts * (p.batch + 1) + 2 * p.batch;
  }
  static FitTask forward(const Problem& p, int32_t* memory) {
    FitTask task;
    if (p.cu_seqlens_q != nullptr) task.cu_seqlens_q = memory;
    return task;
  }
  static FitTask backward(const Problem& p, int32_t* memory) {
    FitTask task;
    if (has_uniform_sequences(p)) return task;
    const auto take = [&](int64_t count) {
      int32_t* const taken = memory;
      memory += count;
      return taken;
    };
    if (p.cu_seqlens_q != nullptr) task.cu_seqlens_q = take(p.batch + 1);
    if (copies_key_layout(p)) task.cu_seqlens_k = take(p.batch + 1);
    task.seqused_q = take(p.batch);
    task.seqused_k = take(p.batch);
    return task;
  }

  // The problem that has them.
  Problem applied(Problem p) const {
    if (cu_seqlens_q != nullptr) p.cu_seqlens_q = cu_seqlens_q;
    if (cu_seqlens_k != nullptr) p.cu_seqlens_k = cu_seqlens_k;
    if (seqused_q != nullptr) p.seqused_q = seqused_q;
    if (seqused_k != nullptr) p.seqused_k = seqused_k;
    return p;
  }
};

// Rows or keys of `view` that are not in use get 0. No data: nothing to clear.
struct ClearTask {
  tilewise_tensor view{};
  int64_t heads = 0;
  int64_t columns = 0;
};

// Bytes that become 0; 16-byte aligned. No data: none.
struct FillTask {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct PrepareParams {
  Problem problem{};
  Problem fitted{};       // the same with the copies of `fit`
  Gradients gradients{};  // of a backward: extents of dbias
  FitTask fit;
  IndexRecord* index_record = nullptr;
  OrderTask order;
  ClearTask rows;        // out or dq
  float* lse = nullptr;  // -inf in rows that are not in use; strides of the problem's
  ClearTask keys[2];     // dk, dv
  FillTask fills[4];
  int32_t clear_blocks = 0;  // set by `finish`
};

// Rows of the tensors that no sequence uses exist, as far as the shapes tell.
inline bool may_have_unused_rows(const Problem& p) {
  return p.seqused_q != nullptr || p.cu_seqlens_q != nullptr;
}
// dk and dv have a row per key of each sequence, whatever k and v look like.
TILEWISE_FN bool keys_per_sequence(const Problem& p) {
  return p.block_table != nullptr || p.kv_batch_idx != nullptr;
}
inline bool may_have_unused_keys(const Problem& p) {
  return p.seqused_k != nullptr || p.leftpad_k != nullptr || p.cu_seqlens_k != nullptr ||
         (!keys_per_sequence(p) && p.kv_batch != p.batch);
}
// Rows of dk and dv, all sequences together.
TILEWISE_FN int64_t gradient_keys(const Problem& p) {
  if (keys_per_sequence(p)) return p.batch * key_capacity(p);
  return p.cu_seqlens_k != nullptr ? p.seqlen_k : p.kv_batch * p.seqlen_k;
}

// The clearing that the pass needs; the caller adds `order` and `fills`.
inline PrepareParams prepare_forward(const Problem& p) {
  PrepareParams params;
  params.problem = p;
  if (!may_have_unused_rows(p)) return params;
  params.rows = {p.out, p.heads_q, p.head_dim_v};
  params.lse = p.lse;
  return params;
}

inline PrepareParams prepare_backward(const Problem& p, const Gradients& g) {
  PrepareParams params;
  params.problem = p;
  params.gradients = g;
  // Any index array may be at fault: then what it is about becomes NaN.
  const bool has_arrays = !has_uniform_sequences(p);
  if (has_arrays) params.rows = {g.dq, p.heads_q, p.head_dim};
  if (has_arrays || may_have_unused_keys(p)) {
    params.keys[0] = {g.dk, p.heads_kv, p.head_dim};
    params.keys[1] = {g.dv, p.heads_kv, p.head_dim_v};
  }
  return params;
}

// Whether the first block has a task of its own: it does not clear.
TILEWISE_FN bool has_first_block(const PrepareParams& params) {
  return params.order.table != nullptr || params.fit.any();
}

// Sets the copies of index arrays; `prepare_forward` or `prepare_backward` has been called.
inline void fit(PrepareParams& params, const FitTask& task, IndexRecord* record) {
  params.fit = task;
  params.fitted = task.applied(params.problem);
  params.index_record = record;
}

// Blocks of the launch; 0: there is nothing to do. Call it last.
inline int64_t finish(PrepareParams& params) {
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
