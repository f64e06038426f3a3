// How a kernel reports an invalid entry of an index array: attention/index_fault.h.
#pragma once

#include "attention/index_fault.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/warp.h"

namespace tilewise::cuda {

// Claims the record for the calling thread: true once per record, for the thread that fills it in.
TILEWISE_DEVICE bool claim(IndexRecord* record) {
  return record != nullptr && ptx::atom_cas(&record->state, 0, 1) == 0;
}

TILEWISE_DEVICE void report(IndexRecord* record, const IndexFault& fault) {
  if (claim(record)) record->fault = fault;
}

// Reports that the index arrays are invalid for a sequence, or the pages in `entries` of its block
// table. Copies everything that the host needs to find out which entry it is: kernels have few
// registers to spare for that, and their code should stay small. One thread calls it.
TILEWISE_DEVICE void report_sequence(IndexRecord* record, const Problem& p, const Sequence& s,
                                     Range entries) {
  if (!claim(record)) return;
  const int64_t b = s.batch;
  record->fault = {};
  record->sequence = b;
  record->page_entry = -1;
#pragma unroll 1
  for (int64_t i = entries.begin; i < entries.end; ++i) {
    if (static_cast<uint32_t>(s.kv.pages[i]) <= s.kv.last_page) continue;
    record->page_entry = i;
    record->page = s.kv.pages[i];
    break;
  }
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

// report_sequence as a function that is not inlined; the call must not stand between wgmma
// instructions.
template <class Params>
TILEWISE_COLD void call_report_sequence(const Params& params, const Sequence& s, Range entries) {
  report_sequence(params.index_record, params.problem, s, entries);
}

// Whether `entries` of the block table name existing pages. A whole warp calls it.
TILEWISE_DEVICE bool pages_fit(const Sequence& s, Range entries) {
  const auto end = static_cast<int32_t>(entries.end);
  uint32_t highest = 0;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(entries.begin) + ptx::lane_index(); i < end;
       i += ptx::kWarpSize)
    highest = max(highest, static_cast<uint32_t>(s.kv.pages[i]));
  return !ptx::any(highest > s.kv.last_page);
}

}  // namespace tilewise::cuda
