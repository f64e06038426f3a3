// The entries of the index arrays in the memory of the GPU, checked as capi/validate_entries.cpp
// checks those of the CPU, in the same order: the first fault is reported.
#pragma once

#include "attention/problem.h"

namespace tilewise::cuda::common {

inline constexpr int kCheckThreads = 512;
inline constexpr int kCheckSharedBytes = kCheckThreads / 32 * 4;
inline constexpr int64_t kCheckBlocks = 1;

// What is wrong, with the meaning of CheckReport's fields.
enum class Fault : int32_t {
  none,
  cu_seqlens_q_first,  // cu_seqlens_q[0] is `value`, not 0
  cu_seqlens_q_order,  // cu_seqlens_q[index] is `value`, less than the entry before, `allowed`
  cu_seqlens_q_last,   // cu_seqlens_q[index] is `value`, more than seqlen_q, `allowed`
  seqused_q,           // seqused_q[index] is `value`: 0 to the rows of the sequence, `allowed`
  max_seqlen_q,        // sequence `index` has `value` rows; max_seqlen_q is `allowed`
  kv_batch_idx,        // kv_batch_idx[index] is `value`: from 0 and less than kv_batch, `allowed`
  cu_seqlens_k_first,  // as with q
  cu_seqlens_k_order,  // as with q
  cu_seqlens_k_last,   // `allowed`: seqlen_k, or batch * block_table_width * page_size when paged
  seqused_k,           // seqused_k[index] is `value`: 0 to the capacity of the sequence, `allowed`
  leftpad_k,           // leftpad_k[index] is `value`: likewise
  cu_seqlens_k_paged,  // sequence `index` has `value` keys: more than its pages hold, `allowed`
  max_seqlen_k,        // sequence `index` has `value` keys; max_seqlen_k is `allowed`
  block_table,         // block_table[index, second] is `value`: less than pages, `allowed`
  dbias_keys,          // sequence `index` has `value` keys; dbias_keys is `allowed`
  dbias_rows,          // sequence `index` has `value` rows; dbias_rows is `allowed`
};

struct CheckReport {
  Fault fault;
  int32_t reserved;
  int64_t index;
  int64_t second;
  int64_t value;
  int64_t allowed;
};

struct CheckParams {
  Problem problem{};
  Gradients gradients{};          // of the backward: extents of dbias; else zeros
  CheckReport* report = nullptr;  // written in full, whatever is found
};

// check.cuh: check(CheckParams)

}  // namespace tilewise::cuda::common
