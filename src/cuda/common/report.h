// How a kernel reports an index array at fault: attention/index_fault.h.
#pragma once

#include "attention/index_fault.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// Whether the caller, one thread, is to fill in the record: nobody has before.
TILEWISE_DEVICE bool claim(IndexRecord* record) {
  return record != nullptr && ptx::atom_cas(&record->state, 0, 1) == 0;
}

TILEWISE_DEVICE void report(IndexRecord* record, const IndexFault& fault) {
  if (claim(record)) record->fault = fault;
}

// Something is wrong with what the arrays say of sequence b. What exactly is left to the host, with
// all that it takes: kernels have few registers, and their code is not to grow.
TILEWISE_DEVICE void report_sequence(IndexRecord* record, const Problem& p, int64_t b) {
  if (!claim(record)) return;
  record->fault = {};
  record->sequence = b;
  const auto note = [&](IndexRecord::Entry at, const int32_t* array, int64_t i) {
    if (array != nullptr) record->entries[at] = array[i];
  };
  note(IndexRecord::cu_q, p.cu_seqlens_q, b);
  note(IndexRecord::cu_q_end, p.cu_seqlens_q, b + 1);
  note(IndexRecord::cu_k, p.cu_seqlens_k, b);
  note(IndexRecord::cu_k_end, p.cu_seqlens_k, b + 1);
  note(IndexRecord::used_q, p.seqused_q, b);
  note(IndexRecord::used_k, p.seqused_k, b);
  note(IndexRecord::leftpad, p.leftpad_k, b);
  note(IndexRecord::kv_batch, p.kv_batch_idx, b);
  constexpr int kWords = sizeof(Problem) / sizeof(uint64_t);
  static_assert(kWords * sizeof(uint64_t) == sizeof(Problem));
  const auto* const from = reinterpret_cast<const uint64_t*>(&p);
  auto* const to = reinterpret_cast<uint64_t*>(&record->problem);
#pragma unroll 1
  for (int i = 0; i < kWords; ++i) to[i] = from[i];
}

// Whether the block table has a page of the tensors for each of the keys `keys` of a sequence. A
// warp asks; lane 0 reports the first entry that has none.
TILEWISE_DEVICE bool pages_fit(IndexRecord* record, const Problem& p, const Sequence& s,
                               Range keys) {
  const Range entries = pages_of(p, s, keys);
  const auto end = static_cast<int32_t>(entries.end);
  bool fit = true;
#pragma unroll 4
  for (int32_t i = static_cast<int32_t>(entries.begin) + ptx::lane_index(); i < end;
       i += ptx::kWarpSize)
    fit &= static_cast<uint32_t>(s.kv.pages[i]) <= s.kv.last_page;
  if (!ptx::any(!fit)) return true;
  if (ptx::lane_index() != 0) return false;
  for (int64_t i = entries.begin; i < entries.end; ++i) {
    const IndexFault fault = page_fault(p, s.batch, i);
    if (!fault.any()) continue;
    report(record, fault);
    break;
  }
  return false;
}

}  // namespace tilewise::cuda
