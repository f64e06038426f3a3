// The checks of the index arrays: see check.h.
#pragma once

#include "cuda/common/block.h"
#include "cuda/common/check.h"

namespace tilewise::cuda::common {

// One check is written once: all threads use it to find the first sequence at fault, then one
// thread uses it to say what is wrong there.
struct Check {
  const Problem& p;
  const Gradients& g;
  SharedWords scratch;  // a word per warp

  static constexpr uint32_t kNone = ~0u;

  TILEWISE_DEVICE static bool fault(CheckReport* report, Fault what, int64_t index, int64_t value,
                                    int64_t allowed, int64_t second = 0) {
    *report = {what, 0, index, second, value, allowed};
    return true;
  }

  TILEWISE_DEVICE bool query(int64_t b, CheckReport* r) const {
    const int64_t rows = query_rows(p, b).size();
    const int64_t used = p.seqused_q != nullptr ? p.seqused_q[b] : rows;
    if (used < 0 || used > rows) return fault(r, Fault::seqused_q, b, used, rows);
    if (p.max_seqlen_q != 0 && used > p.max_seqlen_q)
      return fault(r, Fault::max_seqlen_q, b, used, p.max_seqlen_q);
    return false;
  }

  TILEWISE_DEVICE bool batch_row(int64_t b, CheckReport* r) const {
    const int64_t row = p.kv_batch_idx[b];
    return (row < 0 || row >= p.kv_batch) && fault(r, Fault::kv_batch_idx, b, row, p.kv_batch);
  }

  TILEWISE_DEVICE int64_t capacity_of(int64_t b) const {
    if (p.block_table != nullptr || p.cu_seqlens_k == nullptr) return key_capacity(p);
    return p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b];
  }

  TILEWISE_DEVICE bool keys(int64_t b, CheckReport* r) const {
    const int64_t capacity = capacity_of(b);
    const int64_t used = p.seqused_k != nullptr ? p.seqused_k[b] : 0;
    if (used < 0 || used > capacity) return fault(r, Fault::seqused_k, b, used, capacity);
    const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
    if (padding < 0 || padding > capacity) return fault(r, Fault::leftpad_k, b, padding, capacity);
    const int64_t count = key_count(p, b);
    if (padding + count > capacity) return fault(r, Fault::cu_seqlens_k_paged, b, count, capacity);
    if (p.max_seqlen_k != 0 && count > p.max_seqlen_k)
      return fault(r, Fault::max_seqlen_k, b, count, p.max_seqlen_k);
    return false;
  }

  // Pages `first`, first + step, ... of those in use; `keys` has found nothing.
  TILEWISE_DEVICE bool pages(int64_t b, int first, int step, CheckReport* r) const {
    const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
    const int64_t end = padding + key_count(p, b);
    if (end == padding) return false;
    for (int64_t i = padding / p.page_size + first; i <= (end - 1) / p.page_size; i += step) {
      const int64_t page = p.block_table[b * p.block_table_stride + i];
      if (page < 0 || page >= p.pages) return fault(r, Fault::block_table, b, page, p.pages, i);
    }
    return false;
  }

  TILEWISE_DEVICE bool dbias_extent(int64_t b, CheckReport* r) const {
    const Band band = sequence_of(p, b).band;
    if (band.rows == 0) return false;
    if (band.keys > g.dbias_keys) return fault(r, Fault::dbias_keys, b, band.keys, g.dbias_keys);
    if (g.dbias_stride_row != 0 && band.rows > g.dbias_rows)
      return fault(r, Fault::dbias_rows, b, band.rows, g.dbias_rows);
    return false;
  }

  // The lowest of what the threads of the block have, for all of them.
  TILEWISE_DEVICE uint32_t lowest(uint32_t mine) const {
    ptx::sync_block();
    const uint32_t of_warp = min_of_warp(mine);
    if (ptx::lane_index() == 0) scratch.set(ptx::warp_index(), of_warp);
    ptx::sync_block();
    uint32_t found = kNone;
    for (int warp = 0; warp < kCheckThreads / ptx::kWarpSize; ++warp)
      found = min(found, scratch.get(warp));
    return found;
  }

  // The first i in [0, count) for which `wrong(i, report)`.
  template <class Wrong>
  TILEWISE_DEVICE bool first(int64_t count, const Wrong& wrong, CheckReport* r) const {
    uint32_t mine = kNone;
    for (int64_t i = ptx::thread_index(); i < count && mine == kNone; i += kCheckThreads)
      if (wrong(i, r)) mine = static_cast<uint32_t>(i);
    const uint32_t found = lowest(mine);
    return found != kNone && wrong(found, r);
  }

  TILEWISE_DEVICE bool cu_seqlens(const int32_t* cu, int64_t rows, Fault first_fault,
                                  CheckReport* r) const {
    if (cu == nullptr) return false;
    const auto kind = [&](int i) { return static_cast<Fault>(static_cast<int>(first_fault) + i); };
    if (cu[0] != 0) return fault(r, kind(0), 0, cu[0], 0);
    const auto falls = [&](int64_t b, CheckReport* report) {
      return cu[b + 1] < cu[b] && fault(report, kind(1), b + 1, cu[b + 1], cu[b]);
    };
    if (first(p.batch, falls, r)) return true;
    return cu[p.batch] > rows && fault(r, kind(2), p.batch, cu[p.batch], rows);
  }

  TILEWISE_DEVICE bool key_entries(CheckReport* r) const {
    const bool paged = p.block_table != nullptr;
    if (cu_seqlens(p.cu_seqlens_k, paged ? p.batch * key_capacity(p) : p.seqlen_k,
                   Fault::cu_seqlens_k_first, r))
      return true;
    // Lengths by a thread, pages by a warp; a sequence's pages come before the next one's length.
    uint32_t mine = kNone;
    for (int64_t b = ptx::thread_index(); b < p.batch && mine == kNone; b += kCheckThreads)
      if (keys(b, r)) mine = static_cast<uint32_t>(b);
    if (paged) {
      for (int64_t b = ptx::warp_index(); b < p.batch; b += kCheckThreads / ptx::kWarpSize) {
        if (keys(b, r) || !pages(b, ptx::lane_index(), ptx::kWarpSize, r)) continue;
        mine = min(mine, static_cast<uint32_t>(b));
        break;
      }
    }
    const uint32_t found = lowest(mine);
    return found != kNone && (keys(found, r) || pages(found, 0, 1, r));
  }

  TILEWISE_DEVICE bool run(CheckReport* r) const {
    if (cu_seqlens(p.cu_seqlens_q, p.seqlen_q, Fault::cu_seqlens_q_first, r)) return true;
    if (first(p.batch, [&](int64_t b, CheckReport* at) { return query(b, at); }, r)) return true;
    if (p.kv_batch_idx != nullptr &&
        first(p.batch, [&](int64_t b, CheckReport* at) { return batch_row(b, at); }, r))
      return true;
    if (key_entries(r)) return true;
    return g.dbias != nullptr &&
           first(p.batch, [&](int64_t b, CheckReport* at) { return dbias_extent(b, at); }, r);
  }
};

TILEWISE_KERNEL(kCheckThreads, 1) void check(TILEWISE_PARAMETER CheckParams params) {
  const Check check{params.problem, params.gradients, shared_words(0)};
  CheckReport report{};
  if (!check.run(&report)) report = {};
  if (ptx::thread_index() == 0) *params.report = report;
}

}  // namespace tilewise::cuda::common
