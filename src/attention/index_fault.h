// Invalid entries of index arrays. The kernels, the check on a GPU and the validation on the CPU
// all use these functions, so they agree on what is invalid.
#pragma once

#include "attention/problem.h"

namespace tilewise {

// Each comment gives the meaning of the fields of an IndexFault.
enum class Fault : int32_t {
  none,
  cu_seqlens_q_first,     // cu_seqlens_q[0] is `value`, not 0
  cu_seqlens_q_order,     // cu_seqlens_q[index] is `value`, less than the entry before, `allowed`
  cu_seqlens_q_last,      // cu_seqlens_q[index] is `value`, more than seqlen_q, `allowed`
  cu_seqlens_q_negative,  // cu_seqlens_q[index] is `value`, less than 0
  seqused_q,     // seqused_q[index] is `value`; it must be 0 to the rows of the sequence, `allowed`
  max_seqlen_q,  // sequence `index` has `value` rows; max_seqlen_q is `allowed`
  kv_batch_idx,  // kv_batch_idx[index] is `value`; kv_batch is `allowed`
  cu_seqlens_k_first,       // as for q
  cu_seqlens_k_order,       // as for q
  cu_seqlens_k_last,        // cu_seqlens_k[index] is `value`, more than seqlen_k, `allowed`
  cu_seqlens_k_negative,    // cu_seqlens_k[index] is `value`, less than 0
  cu_seqlens_k_last_paged,  // the same for pages: more than batch * block_table_width * page_size,
                            // `allowed`
  seqused_k,           // seqused_k[index] is `value`; it must be 0 to the capacity of the sequence,
                       // `allowed`
  leftpad_k,           // leftpad_k[index] is `value`; it must be 0 to the capacity of the sequence,
                       // `allowed`
  cu_seqlens_k_paged,  // sequence `index` has `value` keys, with its left padding: more than its
                       // pages hold, `allowed`
  max_seqlen_k,        // sequence `index` has `value` keys; max_seqlen_k is `allowed`
  block_table,         // block_table[index, second] is `value`; pages is `allowed`
  dbias_keys,          // sequence `index` has `value` keys; dbias_keys is `allowed`
  dbias_rows,          // sequence `index` has `value` rows; dbias_rows is `allowed`
  // The faults of an append.
  cu_seqlens_new_first,     // as for q
  cu_seqlens_new_order,     // as for q
  cu_seqlens_new_last,      // cu_seqlens_new[index] is `value`, more than seqlen_new, `allowed`
  cu_seqlens_new_negative,  // cu_seqlens_new[index] is `value`, less than 0
  cache_seqlens,     // cache_seqlens[index] is `value`; with `second` new keys it must be at most
                     // `allowed`
  leftpad_of_cache,  // leftpad_k[index] is `value`; it must be 0 to cache_seqlens[index], `allowed`
  rotary_start,  // rotary_seqlens (`second` is 1) or leftpad_k (0) makes sequence `index` start at
                 // the rotary position `value`, which is below 0
  rotary_rows,   // sequence `index` is rotated up to position `value`; rotary_rows is `allowed`
};

struct IndexFault {
  Fault fault;
  int32_t reserved;
  int64_t index;
  int64_t second;
  int64_t value;
  int64_t allowed;

  TILEWISE_FN bool any() const { return fault != Fault::none; }
};

// The faults *_first, *_order, *_last and *_negative of an array follow each other in this order;
// this returns the one `steps` after `first`.
TILEWISE_FN constexpr Fault fault_after(Fault first, int32_t steps) {
  return static_cast<Fault>(static_cast<int32_t>(first) + steps);
}

// Whether entries `b` and `b + 1` of a cu_seqlens array delimit a valid sequence.
TILEWISE_FN bool cu_seqlens_fit(const int32_t* cu_seqlens, int64_t b, int64_t rows) {
  const int64_t from = cu_seqlens[b];
  const int64_t to = cu_seqlens[b + 1];
  return from >= 0 && from <= to && to <= rows && (b > 0 || from == 0);
}
TILEWISE_FN IndexFault cu_seqlens_fault(const int32_t* cu_seqlens, int64_t b, int64_t rows,
                                        Fault first) {
  if (cu_seqlens_fit(cu_seqlens, b, rows)) return {};
  const int64_t from = cu_seqlens[b];
  const int64_t to = cu_seqlens[b + 1];
  if (b == 0 && from != 0) return {first, 0, 0, 0, from, 0};
  if (to < from) return {fault_after(first, 1), 0, b + 1, 0, to, from};
  if (from < 0) return {fault_after(first, 3), 0, b, 0, from, 0};
  return {fault_after(first, 2), 0, b + 1, 0, to, rows};
}

TILEWISE_FN IndexFault query_fault(const Problem& p, int64_t b) {
  if (p.cu_seqlens_q != nullptr) {
    const IndexFault of_rows =
        cu_seqlens_fault(p.cu_seqlens_q, b, p.seqlen_q, Fault::cu_seqlens_q_first);
    if (of_rows.any()) return of_rows;
  }
  const int64_t rows = query_rows(p, b).size();
  const int64_t used = p.seqused_q != nullptr ? p.seqused_q[b] : rows;
  if (used < 0 || used > rows) return {Fault::seqused_q, 0, b, 0, used, rows};
  if (p.max_seqlen_q != 0 && used > p.max_seqlen_q)
    return {Fault::max_seqlen_q, 0, b, 0, used, p.max_seqlen_q};
  return {};
}

TILEWISE_FN IndexFault kv_batch_fault(const Problem& p, int64_t b) {
  if (p.kv_batch_idx == nullptr) return {};
  const int64_t row = p.kv_batch_idx[b];
  if (row >= 0 && row < p.kv_batch) return {};
  return {Fault::kv_batch_idx, 0, b, 0, row, p.kv_batch};
}

// Finds a fault in everything about the keys except the pages.
TILEWISE_FN IndexFault key_fault(const Problem& p, int64_t b) {
  const IndexFault of_row = kv_batch_fault(p, b);
  if (of_row.any()) return of_row;
  const bool paged = p.block_table != nullptr;
  int64_t capacity = key_capacity(p);
  int64_t used = capacity;
  if (p.cu_seqlens_k != nullptr) {
    IndexFault of_rows = cu_seqlens_fault(
        p.cu_seqlens_k, b, paged ? p.batch * capacity : p.seqlen_k, Fault::cu_seqlens_k_first);
    if (paged && of_rows.fault == Fault::cu_seqlens_k_last)
      of_rows.fault = Fault::cu_seqlens_k_last_paged;
    if (of_rows.any()) return of_rows;
    used = int64_t{p.cu_seqlens_k[b + 1]} - p.cu_seqlens_k[b];
    if (!paged) capacity = used;
  }
  if (p.seqused_k != nullptr) {
    used = p.seqused_k[b];
    if (used < 0 || used > capacity) return {Fault::seqused_k, 0, b, 0, used, capacity};
  }
  const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
  if (padding < 0 || padding > capacity) return {Fault::leftpad_k, 0, b, 0, padding, capacity};
  const int64_t count = max(int64_t{0}, used - padding);
  if (padding + count > capacity)
    return {Fault::cu_seqlens_k_paged, 0, b, 0, padding + count, capacity};
  if (p.max_seqlen_k != 0 && count > p.max_seqlen_k)
    return {Fault::max_seqlen_k, 0, b, 0, count, p.max_seqlen_k};
  return {};
}

TILEWISE_FN IndexFault page_fault(const Problem& p, int64_t b, int64_t i) {
  const int64_t page = p.block_table[b * p.block_table_stride + i];
  if (page >= 0 && page < p.pages) return {};
  return {Fault::block_table, 0, b, i, page, p.pages};
}

// Backward only: dbias needs a row and a column for every row and key of the sequence.
TILEWISE_FN IndexFault dbias_fault(const Problem& p, const Gradients& g, int64_t b) {
  if (g.dbias == nullptr) return {};
  const Band band = sequence_of(p, b).band;
  if (band.rows == 0) return {};
  if (band.keys > g.dbias_keys) return {Fault::dbias_keys, 0, b, 0, band.keys, g.dbias_keys};
  if (g.dbias_stride_row != 0 && band.rows > g.dbias_rows)
    return {Fault::dbias_rows, 0, b, 0, band.rows, g.dbias_rows};
  return {};
}

// Finds a fault of sequence b in everything except its pages.
TILEWISE_FN IndexFault sequence_fault(const Problem& p, int64_t b) {
  const IndexFault of_rows = query_fault(p, b);
  return of_rows.any() ? of_rows : key_fault(p, b);
}

// The first fault that the kernels of a GPU find, kept until the host reads and clears it.
struct IndexRecord {
  // Entries of one sequence, in the order of IndexRecord::entries.
  enum Entry { cu_q, cu_q_end, cu_k, cu_k_end, used_q, used_k, leftpad, kv_batch, kEntries };

  uint64_t state;    // 0: no fault is recorded
  IndexFault fault;  // none: the host derives the fault from the fields below, which the kernel
                     // read for a sequence
  int64_t sequence;
  int64_t page_entry;  // entry of the block table that holds no valid page; -1: not known
  int64_t page;
  int32_t entries[kEntries];  // of the sequence, where the problem has the array
  Problem problem;
};

}  // namespace tilewise
