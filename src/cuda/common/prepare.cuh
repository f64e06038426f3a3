// The kernel that runs before the main kernels: see prepare.h.
//
// Grid: set_grid(params) CTAs of kPrepareThreads threads. CTA 0, if has_first_block(params), checks
// and copies index arrays (CopyIndices) and sorts the sequences (Order). The other CTAs write what
// no main kernel writes (Clear): 0 into unused rows of out, dq, dk and dv, -inf into their lse, NaN
// where index entries are invalid, zeros into the workspace, and -inf into max_logits. The kernel
// reads index arrays only.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
#include "cuda/common/check.cuh"
#include "cuda/common/report.h"
#include "cuda/common/row_location.h"

namespace tilewise::cuda::common {

// --- the order of the sequences ------------------------------------------------------------------

TILEWISE_DEVICE uint32_t tiles_of(const Problem& p, const OrderTask& task, int64_t b) {
  if (task.counts == OrderTask::Counts::keys)
    return static_cast<uint32_t>(ceil_div(key_count(p, b), task.tile));
  return static_cast<uint32_t>(ceil_div(used_rows(p, b).value * task.group, task.tile));
}

// The bucket of a count; it grows with the count. Up to 31 each count has a bucket. Above, a bucket
// is given by the leading bit and the three bits after it; the largest count, 2^31, is in bucket
// 240.
TILEWISE_DEVICE int bucket_of(uint32_t tiles) {
  if (tiles < 32) return static_cast<int>(tiles);
  int exponent = 5;
  while (exponent < 31 && tiles >> (exponent + 1) != 0) ++exponent;
  return 32 + (exponent - 5) * 8 + static_cast<int>((tiles >> (exponent - 3)) & 7);
}

// The rank of a lane's sequence among the sequences of its warp that are in the same bucket.
struct Peers {
  uint32_t before;
  uint32_t count;  // 0: the lane has no sequence

  TILEWISE_DEVICE bool is_last() const { return before + 1 == count; }
  TILEWISE_DEVICE static Peers of(uint32_t bucket, bool valid) {
    Peers peers{0, 0};
    const uint32_t lane_bucket = valid ? bucket : ~0u;
    for (int lane = 0; lane < ptx::kWarpSize; ++lane) {
      const bool same = ptx::shuffle(lane_bucket, lane) == lane_bucket && valid;
      if (same && lane < ptx::lane_index()) ++peers.before;
      if (same) ++peers.count;
    }
    return peers;
  }
};

// A stable counting sort, longest sequences first. Each warp counts a run of sequences with
// counters of its own, so nothing depends on which warp is first. The counters are ordered by
// bucket, the longest first, and by warp inside a bucket: their prefix sum is where a warp's
// sequences go.
struct Order {
  const Problem& p;
  const OrderTask& task;
  SharedWords counters;
  SharedWords scratch;

  TILEWISE_DEVICE int counter(int bucket) const {
    return (kOrderBuckets - 1 - bucket) * kPrepareWarps + ptx::warp_index();
  }

  // Visits the sequences of this warp's run, 32 at a time: visit(sequence, tiles, counter + rank).
  template <class Visit>
  TILEWISE_DEVICE void walk(const Visit& visit) const {
    const int64_t run = round_up(ceil_div(p.batch, kPrepareWarps), ptx::kWarpSize);
    const int64_t begin = ptx::warp_index() * run;
    for (int64_t first = begin; first < min(p.batch, begin + run); first += ptx::kWarpSize) {
      const int64_t b = first + ptx::lane_index();
      const bool valid = b < p.batch;
      const uint32_t tiles = valid ? tiles_of(p, task, b) : 0;
      const int bucket = bucket_of(tiles);
      const Peers peers = Peers::of(static_cast<uint32_t>(bucket), valid);
      uint32_t at = 0;
      if (valid) at = counters.get(counter(bucket));
      ptx::sync_warp();
      if (valid && peers.is_last()) counters.set(counter(bucket), at + peers.count);
      ptx::sync_warp();
      if (valid) visit(b, tiles, at + peers.before);
    }
  }

  TILEWISE_DEVICE void run() const {
    constexpr int kCountersPerThread = kOrderBuckets * kPrepareWarps / kPrepareThreads;
    const int thread = ptx::thread_index();
    for (int i = thread; i < kOrderBuckets * kPrepareWarps; i += kPrepareThreads)
      counters.set(i, 0);
    ptx::sync_block();
    walk([](int64_t, uint32_t, uint32_t) {});
    ptx::sync_block();
    uint32_t sum = 0;
    for (int i = 0; i < kCountersPerThread; ++i)
      sum += counters.get(thread * kCountersPerThread + i);
    uint32_t total = 0;
    uint32_t before = scan_of_block(sum, scratch, &total);
    for (int i = 0; i < kCountersPerThread; ++i) {
      const uint32_t count = counters.get(thread * kCountersPerThread + i);
      counters.set(thread * kCountersPerThread + i, before);
      before += count;
    }
    ptx::sync_block();
    TileOrder::Entry* const table = task.table;
    walk([&](int64_t b, uint32_t tiles, uint32_t index) {
      table[index] = {static_cast<int32_t>(tiles), static_cast<int32_t>(b)};
    });
    ptx::sync_block();
    accumulate();
  }

  // Turns table[i].first from the tiles of an entry into the tiles before it.
  TILEWISE_DEVICE void accumulate() const {
    TileOrder::Entry* const table = task.table;
    const int64_t per_thread = ceil_div(p.batch, kPrepareThreads);
    const int64_t begin = min(p.batch, ptx::thread_index() * per_thread);
    const int64_t end = min(p.batch, begin + per_thread);
    uint32_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += static_cast<uint32_t>(table[i].first);
    uint32_t total = 0;
    auto before = static_cast<int32_t>(scan_of_block(sum, scratch, &total));
    for (int64_t i = begin; i < end; ++i) {
      const int32_t tiles = table[i].first;
      table[i].first = before;
      before += tiles;
    }
    if (ptx::thread_index() == 0) table[p.batch] = {static_cast<int32_t>(total), -1};
  }
};

// --- invalid index arrays ------------------------------------------------------------------------

static_assert(kCheckThreads == kPrepareThreads);

// A warp sets one row of all heads to 0 or NaN.
struct RowFill {
  bool with_nan;

  TILEWISE_DEVICE void fill(const ClearTask& task, const RowLocation& location) const {
    if (task.view.data == nullptr) return;
    const int64_t size = element_bytes(task.dtype);
    const uint32_t nan = task.dtype == TILEWISE_FLOAT32   ? 0x7fc00000u
                         : task.dtype == TILEWISE_FLOAT16 ? 0x7e007e00u
                                                          : 0x7fc07fc0u;
    const uint32_t word = with_nan ? nan : 0;
    char* const first = static_cast<char*>(task.view.data) + location.offset(task.view) * size;
    const int64_t bytes = task.columns * size;
    const int64_t stride = task.view.stride_head * size;
    const int64_t unit = bytes % 16 == 0 && stride % 16 == 0 && is_aligned(first, 16) ? 16 : size;
    const auto units = static_cast<uint32_t>(bytes / unit);
    for (int64_t i = ptx::lane_index(); i < task.heads * units; i += ptx::kWarpSize) {
      const int64_t head = i / units;
      char* const at = first + head * stride + (i - head * units) * unit;
      if (unit == 16) {
        const uint32_t words[4] = {word, word, word, word};
        ptx::st_global_v4_b32(at, words);
      } else if (unit == 4) {
        *reinterpret_cast<uint32_t*>(at) = word;
      } else {
        *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(word);
      }
    }
  }
};

// The first task of CTA 0: writes the copies of the arrays (IndexCopies). In a backward the copies
// give a sequence with invalid entries no rows and no keys, and its gradients become NaN here.
struct CopyIndices {
  const PrepareParams& params;
  const Problem& p;
  const Check check;

  TILEWISE_DEVICE CopyIndices(const PrepareParams& all, SharedWords scratch)
      : params(all), p(all.problem), check{all.problem, all.gradients, scratch} {}

  TILEWISE_DEVICE void copy(int32_t* to, const int32_t* from, bool fits) const {
    if (to == nullptr) return;
    for (int64_t b = ptx::thread_index(); b <= p.batch; b += kPrepareThreads)
      to[b] = fits ? from[b] : 0;
  }

  TILEWISE_DEVICE bool fits(int64_t b) const {
    const Sequence s = sequence_of(p, b);
    const Range entries = s.kv.entries({0, s.band.keys});
    const IndexFault of_bias = dbias_fault(p, params.gradients, b);
    const bool of_arrays = s.fits && pages_fit(s, entries);
    if (of_arrays && !of_bias.any()) return true;
    if (ptx::lane_index() == 0) {
      if (of_arrays)
        report(params.index_record, of_bias);
      else
        report_sequence(params.index_record, p, s, entries);
    }
    return false;
  }

  TILEWISE_DEVICE void fill_with_nan(int64_t b) const {
    const RowFill nan{true};
    const Sequence s = sequence_of(p, b);
    for (int64_t i = 0; i < s.band.rows; ++i)
      nan.fill(params.rows, {b, i, s.batch_index, s.first_row + i, true, true});
    const KvSource source = gradient_source(p, s);
    for (int64_t i = 0; i < s.band.keys; ++i) {
      const RowLocation key = {b, i, source.batch_index, source.first + i, true, true};
      nan.fill(params.keys[0], key);
      nan.fill(params.keys[1], key);
    }
  }

  // Returns the problem to sort: the given one if the copies equal its arrays, whose entries are in
  // the L1 cache by now, else the one with the copies.
  TILEWISE_DEVICE const Problem& run() const {
    const bool of_backward = params.index_copies.of_backward();
    const bool with_keys = params.index_copies.cu_seqlens_k != nullptr;
    const uint32_t invalid =
        check.first(p.batch, [&](int64_t b) { return !check.has_valid_layout(b, with_keys); });
    const bool valid_layout = invalid == Check::kNone;
    if (!valid_layout && ptx::thread_index() == 0) {
      const IndexFault fault = query_fault(p, invalid);
      report(params.index_record, fault.any() ? fault : key_fault(p, invalid));
    }
    copy(params.index_copies.cu_seqlens_q, p.cu_seqlens_q, valid_layout);
    copy(params.index_copies.cu_seqlens_k, p.cu_seqlens_k, valid_layout);
    for (int64_t b = ptx::warp_index(); of_backward && b < p.batch; b += kPrepareWarps) {
      const bool good = valid_layout && fits(b);
      if (valid_layout && !good) fill_with_nan(b);
      if (ptx::lane_index() != 0) continue;
      const SequenceKeys keys = sequence_keys(p, b);
      const int64_t padding = p.leftpad_k != nullptr ? p.leftpad_k[b] : 0;
      params.index_copies.seqused_q[b] = good ? static_cast<int32_t>(used_rows(p, b).value) : 0;
      params.index_copies.seqused_k[b] = good ? static_cast<int32_t>(padding + keys.count) : 0;
    }
    ptx::sync_block();
    return valid_layout && !of_backward ? p : params.checked_problem;
  }
};

// --- rows and keys that no main kernel writes ----------------------------------------------------

// The warps of all clearing CTAs share the rows, keys and bytes to clear.
struct Clear {
  const PrepareParams& params;
  int64_t warp;  // counted over all clearing CTAs
  int64_t warps;
  bool valid_layout;  // cu_seqlens place every sequence inside its tensor
  bool all_fit;       // every entry of every sequence is valid, except pages

  // All threads of the CTA call it. cu_seqlens_k are checked only in a backward, which clears keys.
  TILEWISE_DEVICE static Clear of(const PrepareParams& params, int64_t block, const Check& check) {
    const Problem& p = params.problem;
    const bool with_keys = params.index_copies.cu_seqlens_k != nullptr;
    // Set for a sequence with a valid layout that has another invalid entry.
    constexpr uint32_t kEntryFault = 1u << 31;
    uint32_t lowest = Check::kNone;
    for (int64_t b = ptx::thread_index(); b < p.batch; b += kPrepareThreads) {
      const auto at = static_cast<uint32_t>(b);
      if (!check.has_valid_layout(b, with_keys))
        lowest = min(lowest, at);
      else if (!fits(params, b))
        lowest = min(lowest, at | kEntryFault);
    }
    const uint32_t found = check.lowest(lowest);
    const bool all_fit = found == Check::kNone;
    const bool valid_layout = found >= kEntryFault;
    // No other kernel reports a sequence without rows in use.
    if (valid_layout && !all_fit && ptx::thread_index() == 0) {
      const Sequence s = sequence_of(p, found - kEntryFault);
      if (!s.fits) report_sequence(params.index_record, p, s, {});
    }
    return {params, block * kPrepareWarps + ptx::warp_index(),
            int64_t{params.clear_blocks} * kPrepareWarps, valid_layout, all_fit};
  }

  // Whether the entries of sequence b are valid, except its pages.
  TILEWISE_DEVICE static bool fits(const PrepareParams& params, int64_t b) {
    return sequence_of(params.problem, b).fits &&
           !dbias_fault(params.problem, params.gradients, b).any();
  }

  // Calls clear(location, with_nan) for those of the rows [first, count) that are not in use. A
  // warp tests 32 rows at a time.
  template <class Locate, class Body>
  TILEWISE_DEVICE void each_unused(int64_t first, int64_t count, const Locate& locate,
                                   const Body& clear) const {
    if (!valid_layout || !all_fit) first = 0;
    for (int64_t at = first + warp * ptx::kWarpSize; at < count; at += warps * ptx::kWarpSize) {
      const int64_t row = at + ptx::lane_index();
      const bool is_unused = row < count && (!valid_layout || !locate(row).in_use);
      if (!ptx::any(is_unused)) continue;
      for (int lane = 0; lane < ptx::kWarpSize; ++lane) {
        if (ptx::shuffle(is_unused ? 1u : 0u, lane) == 0) continue;
        const RowLocation location = locate(at + lane);
        clear(location,
              !valid_layout || (!all_fit && location.in_sequence && !fits(params, location.batch)));
      }
    }
  }

  TILEWISE_DEVICE void rows() const {
    const Problem& p = params.problem;
    if (params.rows.view.data == nullptr && params.lse == nullptr) return;
    // Without seqused_q only rows after the sequences can be unused, so no other row is tested.
    int64_t first = 0;
    if (p.seqused_q == nullptr) {
      if (p.cu_seqlens_q == nullptr)
        first = total_rows(p);
      else if (p.batch > 0)
        first = p.cu_seqlens_q[p.batch];
    }
    each_unused(
        first, total_rows(p), [&](int64_t i) { return locate_row(p, i); },
        [&](const RowLocation& location, bool with_nan) {
          RowFill{with_nan}.fill(params.rows, location);
          if (params.lse == nullptr) return;
          const int64_t first_head = location.batch_index * params.lse_stride_batch + location.row;
          const float value = with_nan ? ptx::float_of(0x7fc00000u) : params.unused_lse;
          for (int64_t h = ptx::lane_index(); h < p.heads_q; h += ptx::kWarpSize) {
            const int64_t at = first_head + h * params.lse_stride_head;
            params.lse[at] = value;
            if (params.lse_low != nullptr) params.lse_low[at] = 0.0f;
          }
        });
  }

  TILEWISE_DEVICE void keys() const {
    const Problem& p = params.problem;
    const ClearTask& dk = params.keys[0];
    const ClearTask& dv = params.keys[1];
    if (dk.view.data == nullptr && dv.view.data == nullptr) return;
    // Without seqused_k, leftpad_k and gradients per sequence, only keys after the sequences can
    // be unused, so no other key is tested.
    int64_t first = 0;
    if (p.seqused_k == nullptr && p.leftpad_k == nullptr && !keys_per_sequence(p)) {
      if (p.cu_seqlens_k == nullptr)
        first = p.batch * p.seqlen_k;
      else if (p.batch > 0)
        first = p.cu_seqlens_k[p.batch];
    }
    each_unused(
        first, gradient_keys(p), [&](int64_t i) { return locate_key(p, i); },
        [&](const RowLocation& location, bool with_nan) {
          RowFill{with_nan}.fill(dk, location);
          RowFill{with_nan}.fill(dv, location);
        });
  }

  TILEWISE_DEVICE void fill(const FillTask& task) const {
    auto* const words = static_cast<uint32_t*>(task.data);
    const int64_t count = task.bytes / 4;
    const bool aligned = is_aligned(words, 16);
    const int64_t step = warps * ptx::kWarpSize * 4;
    for (int64_t i = (warp * ptx::kWarpSize + ptx::lane_index()) * 4; i < count; i += step) {
      const uint32_t four[4] = {task.word, task.word, task.word, task.word};
      if (aligned && i + 4 <= count)
        ptx::st_global_v4_b32(words + i, four);
      else
        for (int64_t j = i; j < min(i + 4, count); ++j) words[j] = task.word;
    }
  }

  TILEWISE_DEVICE void run() const {
    rows();
    keys();
    for (const FillTask& task : params.fills)
      if (task.data != nullptr) fill(task);
  }
};

TILEWISE_KERNEL(kPrepareThreads, 1) void prepare(TILEWISE_PARAMETER PrepareParams params) {
  ptx::griddepcontrol_launch_dependents();
  const SharedWords scratch = shared_words(kOrderBuckets * kPrepareWarps * 4);
  int64_t block = ptx::block_index();
  if (has_first_block(params)) {
    if (block == 0) {
      const Problem& p =
          params.index_copies.any() ? CopyIndices(params, scratch).run() : params.problem;
      if (params.order.table == nullptr) return;
      const Order order{p, params.order, shared_words(0), scratch};
      order.run();
      return;
    }
    --block;
  }
  Clear::of(params, block, {params.problem, params.gradients, scratch}).run();
}

}  // namespace tilewise::cuda::common
