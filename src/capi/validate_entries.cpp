// Checks of the entries of index arrays, before anything follows them.
#include <algorithm>
#include <vector>

#include "attention/problem.h"
#include "capi/refusal.h"
#include "capi/validate.h"
#include "cuda/index_errors.h"

namespace tilewise::capi {
namespace {

void refuse_fault(const IndexFault& fault) {
  if (fault.any()) refuse(TILEWISE_INVALID_ARGUMENT, cuda::sentence(fault));
}

// The keys of a sequence, with its left padding.
int64_t used_keys(const Problem& p, int64_t b) {
  if (p.seqused_k != nullptr) return p.seqused_k[b];
  if (p.cu_seqlens_k != nullptr) return int64_t{p.cu_seqlens_k[b + 1]} - p.cu_seqlens_k[b];
  return key_capacity(p);
}

void check_query_entries(const Problem& p) {
  if (p.cu_seqlens_q != nullptr) {
    check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.seqlen_q, "seqlen_q");
  }
  // Without an array all sequences have the same length.
  const bool uniform = p.cu_seqlens_q == nullptr && p.seqused_q == nullptr;
  const int64_t sequences = uniform ? min<int64_t>(p.batch, 1) : p.batch;
  for (int64_t b = 0; b < sequences; ++b) refuse_fault(query_fault(p, b));
}

void check_key_entries(const Problem& p) {
  if (p.cu_seqlens_k != nullptr) {
    // With a block table cu_seqlens_k only gives the lengths of the sequences.
    const bool paged = p.block_table != nullptr;
    check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, p.batch,
                     paged ? p.batch * key_capacity(p) : p.seqlen_k,
                     paged ? "batch * block_table_width * page_size" : "seqlen_k");
  }
  const bool uniform = p.cu_seqlens_k == nullptr && p.seqused_k == nullptr &&
                       p.leftpad_k == nullptr && p.block_table == nullptr;
  const int64_t sequences = uniform ? min<int64_t>(p.batch, 1) : p.batch;
  for (int64_t b = 0; b < sequences; ++b) {
    refuse_fault(key_fault(p, b));
    if (p.block_table != nullptr) {
      const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
      check_pages(p.block_table, p.block_table_stride, b, {padding, used_keys(p, b)}, p.page_size,
                  p.pages);
    }
  }
}

}  // namespace

void check_cu_seqlens(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                      const char* rows_name) {
  require(cu_seqlens[0] == 0, name, "[0] is ", cu_seqlens[0], ": it must be 0");
  for (int64_t b = 0; b < batch; ++b) {
    require(cu_seqlens[b + 1] >= cu_seqlens[b], name, "[", b + 1, "] is ", cu_seqlens[b + 1],
            ": it must not be less than the entry before it, ", cu_seqlens[b]);
  }
  require(cu_seqlens[batch] <= rows, name, "[", batch, "] is ", cu_seqlens[batch],
          ": it must be at most ", rows_name, ", which is ", rows);
}

void check_kv_batch_idx(const int32_t* kv_batch_idx, int64_t batch, int64_t kv_batch) {
  for (int64_t b = 0; b < batch; ++b) {
    require(kv_batch_idx[b] >= 0 && kv_batch_idx[b] < kv_batch, "kv_batch_idx[", b, "] is ",
            kv_batch_idx[b], ": it must be at least 0 and less than kv_batch, which is ", kv_batch);
  }
}

void check_distinct(const int32_t* kv_batch_idx, int64_t batch) {
  std::vector<int32_t> sorted(kv_batch_idx, kv_batch_idx + batch);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return;
  const auto same = [&](int64_t from) {
    return std::find(kv_batch_idx + from, kv_batch_idx + batch, *twice) - kv_batch_idx;
  };
  const int64_t first = same(0);
  const int64_t second = same(first + 1);
  refuse(TILEWISE_INVALID_ARGUMENT, "kv_batch_idx[", second, "] is ", *twice,
         ", like kv_batch_idx[", first,
         "]: when keys are appended, every sequence needs rows of its own");
}

void check_pages(const int32_t* block_table, int64_t stride, int64_t sequence, Range keys,
                 int64_t page_size, int64_t pages) {
  if (keys.empty()) return;
  const int64_t last = (keys.end - 1) / page_size;
  for (int64_t i = keys.begin / page_size; i <= last; ++i) {
    const int32_t page = block_table[sequence * stride + i];
    require(page >= 0 && page < pages, "block_table[", sequence, ", ", i, "] is ", page,
            ": it must be at least 0 and less than pages, which is ", pages);
  }
}

void check_index_arrays(const Problem& p) {
  check_query_entries(p);
  if (p.kv_batch_idx != nullptr) check_kv_batch_idx(p.kv_batch_idx, p.batch, p.kv_batch);
  check_key_entries(p);
}

}  // namespace tilewise::capi
