// Launch geometry of the combine kernels (combine.cuh), which turn the partial results of splits,
// chunks or Stream-K shares into out and lse.
#pragma once

#include "cuda/params.h"

namespace tilewise::cuda::common {

inline constexpr int kCombineThreads = 128;  // per group of warps
inline constexpr int kCombineWarps = kCombineThreads / 32;
inline constexpr int kCombineGroups = 4;  // per CTA, at most
// Shared memory of one reduction over the groups: a float per lane of a warp of each group.
inline constexpr int kCombineGroupsBytes = kCombineGroups * 32 * 4;
inline constexpr int64_t kMaxRowsWithGroups = 32;

inline constexpr int kCombineRowsPerBlock = 8;
inline constexpr int kCombineByWarpsThreads = kCombineRowsPerBlock * 32;

// Rows to combine, counted per head: of Stream-K tiles, of tiles cut into chunks, or of split
// sequences.
TILEWISE_FN int64_t combined_rows(const ForwardParams& p) {
  if (p.stream_k.any()) return int64_t{p.stream_k.tiles} * p.row_tile;
  return p.chunks.any() ? p.problem.batch * p.order.heads * p.packed_rows
                        : total_rows(p.problem) * p.problem.heads_q;
}

// Whether one warp instead of one CTA combines a row: 16 thousand CTAs would take 50 us. (H200, 4
// heads and 2k causal rows: 57 -> 37 us; but 1024 rows in all: 38 -> 40 us.)
inline bool combines_by_warps(const ForwardParams& p) {
  if (p.stream_k.any()) return true;
  constexpr int64_t kMinRows = 2048;
  constexpr int32_t kMaxSplitsPerWarp = 32;  // a lane holds the weight of one split
  return !p.chunks.any() && p.order.splits <= kMaxSplitsPerWarp && combined_rows(p) >= kMinRows &&
         p.problem.head_dim_v % 4 == 0;
}

// Groups of warps per row. Each group reads 32 splits at a time, so several groups wait for memory
// together. Many rows of 16 warps each would leave the CTAs of the next launch little room. (H200,
// 16/1 heads, one -> four groups: B1 with 8k keys 10.3 -> 8.2 us, B2 11.1 -> 9.3; but B4, 64 rows,
// 11.0 -> 13.5.) The number of groups changes the order of sums of more than 32 splits, so it must
// not depend on the batch when batch_invariant is set.
TILEWISE_FN int32_t combine_groups(const ForwardParams& p) {
  constexpr int32_t kSplitsPerGroup = 32;
  const int32_t max_splits =
      p.chunks.any() ? p.chunks.max_chunks - p.order.sequences + 1 : int32_t{p.order.splits};
  const bool few = p.problem.batch_invariant == 0 && combined_rows(p) <= kMaxRowsWithGroups;
  return few && max_splits > kSplitsPerGroup ? kCombineGroups : 1;
}

inline int64_t combine_blocks(const ForwardParams& p) {
  return combines_by_warps(p) ? ceil_div(combined_rows(p), kCombineRowsPerBlock) : combined_rows(p);
}

// combine.cuh: template <class Element, class Row> combine(ForwardParams), combine_by_warps

}  // namespace tilewise::cuda::common
