// Finds the first invalid entry of the index arrays of a problem: see check.h.
//
// Grid: one CTA of kCheckThreads threads. A thread checks every kCheckThreads-th sequence; pages
// are checked by warps, one sequence at a time. Reads cu_seqlens, seqused, leftpad_k, kv_batch_idx
// and the block table; writes CheckParams::report. The prepare kernel also uses `Check`.
#pragma once

#include "cuda/common/block.h"
#include "cuda/common/check.h"

namespace tilewise::cuda::common {

// All threads of the CTA call every function that returns an IndexFault or a common minimum.
struct Check {
  const Problem& p;
  const Gradients& g;
  SharedWords scratch;  // a word per warp

  static constexpr uint32_t kNone = ~0u;

  // The minimum of `x` over the CTA, in all threads.
  TILEWISE_DEVICE uint32_t lowest(uint32_t x) const {
    ptx::sync_block();
    const uint32_t of_warp = min_of_warp(x);
    if (ptx::lane_index() == 0) scratch.set(ptx::warp_index(), of_warp);
    ptx::sync_block();
    uint32_t found = kNone;
    for (int warp = 0; warp < kCheckThreads / ptx::kWarpSize; ++warp)
      found = min(found, scratch.get(warp));
    return found;
  }

  // The first i in [0, count) for which is_wrong(i) is true, or kNone.
  template <class IsWrong>
  TILEWISE_DEVICE uint32_t first(int64_t count, const IsWrong& is_wrong) const {
    uint32_t found = kNone;
    for (int64_t i = ptx::thread_index(); i < count && found == kNone; i += kCheckThreads)
      if (is_wrong(i)) found = static_cast<uint32_t>(i);
    return lowest(found);
  }

  // fault_of(b) of the first sequence b that has a fault.
  template <class FaultOf>
  TILEWISE_DEVICE IndexFault first_fault(const FaultOf& fault_of) const {
    const uint32_t b = first(p.batch, [&](int64_t at) { return fault_of(at).any(); });
    return b == kNone ? IndexFault{} : fault_of(b);
  }

  TILEWISE_DEVICE IndexFault cu_seqlens(const int32_t* cu, int64_t rows, Fault first_kind) const {
    if (cu == nullptr) return {};
    if (p.batch == 0) return {cu[0] != 0 ? first_kind : Fault::none, 0, 0, 0, cu[0], 0};
    // The order of the CPU's check: a decreasing entry is reported before one that is too large.
    const uint32_t b =
        first(p.batch, [&](int64_t at) { return cu[at + 1] < cu[at] || (at == 0 && cu[0] != 0); });
    if (b != kNone) return cu_seqlens_fault(cu, b, rows, first_kind);
    if (cu[p.batch] <= rows) return {};
    return {fault_after(first_kind, 2), 0, p.batch, 0, cu[p.batch], rows};
  }

  // Faults of cu_seqlens_q and of cu_seqlens_k.
  TILEWISE_DEVICE IndexFault query_layout() const {
    return cu_seqlens(p.cu_seqlens_q, p.seqlen_q, Fault::cu_seqlens_q_first);
  }
  TILEWISE_DEVICE IndexFault key_layout() const {
    const bool paged = p.block_table != nullptr;
    IndexFault fault = cu_seqlens(p.cu_seqlens_k, paged ? p.batch * key_capacity(p) : p.seqlen_k,
                                  Fault::cu_seqlens_k_first);
    if (paged && fault.fault == Fault::cu_seqlens_k_last)
      fault.fault = Fault::cu_seqlens_k_last_paged;
    return fault;
  }

  // Whether cu_seqlens place sequence b inside q and, with_keys, inside k and v.
  TILEWISE_DEVICE bool has_valid_layout(int64_t b, bool with_keys) const {
    if (p.cu_seqlens_q != nullptr && !cu_seqlens_fit(p.cu_seqlens_q, b, p.seqlen_q)) return false;
    return !with_keys || cu_seqlens_fit(p.cu_seqlens_k, b, p.seqlen_k);
  }

  // The first invalid page of sequence b among its entries start, start + step, ...
  TILEWISE_DEVICE IndexFault pages(int64_t b, int start, int step) const {
    const Sequence s = sequence_of(p, b);
    const Range entries = s.kv.entries({0, s.band.keys});
    for (int64_t i = entries.begin + start; i < entries.end; i += step) {
      const IndexFault fault = page_fault(p, b, i);
      if (fault.any()) return fault;
    }
    return {};
  }

  TILEWISE_DEVICE IndexFault keys() const {
    const IndexFault layout = key_layout();
    if (layout.any()) return layout;
    // A thread checks the length of a sequence, a warp its pages. Faults are reported in this
    // order: length and pages of sequence 0, length and pages of sequence 1, ...
    uint32_t found = kNone;
    for (int64_t b = ptx::thread_index(); b < p.batch && found == kNone; b += kCheckThreads)
      if (key_fault(p, b).any()) found = static_cast<uint32_t>(b);
    if (p.block_table != nullptr) {
      for (int64_t b = ptx::warp_index(); b < p.batch; b += kCheckThreads / ptx::kWarpSize) {
        if (!pages(b, ptx::lane_index(), ptx::kWarpSize).any()) continue;
        found = min(found, static_cast<uint32_t>(b));
        break;
      }
    }
    const uint32_t b = lowest(found);
    if (b == kNone) return {};
    const IndexFault of_length = key_fault(p, b);
    return of_length.any() ? of_length : pages(b, 0, 1);
  }

  TILEWISE_DEVICE IndexFault run() const {
    IndexFault fault = query_layout();
    if (!fault.any()) fault = first_fault([&](int64_t b) { return query_fault(p, b); });
    if (!fault.any()) fault = first_fault([&](int64_t b) { return kv_batch_fault(p, b); });
    if (!fault.any()) fault = keys();
    if (!fault.any()) fault = first_fault([&](int64_t b) { return dbias_fault(p, g, b); });
    return fault;
  }
};

TILEWISE_KERNEL(kCheckThreads, 1) void check(TILEWISE_PARAMETER CheckParams params) {
  const Check check{params.problem, params.gradients, shared_words(0)};
  const IndexFault fault = check.run();
  if (ptx::thread_index() == 0) *params.report = fault;
}

}  // namespace tilewise::cuda::common
