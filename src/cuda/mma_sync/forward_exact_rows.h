// Recomputes the rows whose scores are too large for the softmax of the main loop
// (`needs_recompute`).
#pragma once

#include "cuda/common/exact_row.h"
#include "cuda/common/forward_results.h"
#include "cuda/mma_sync/forward_column_warps.h"

namespace tilewise::cuda::mma_sync {

// Sets the lse of the rows of a warp whose m and l do not determine their result to
// `recompute_marker`.
template <class C>
TILEWISE_DEVICE void mark_rows_to_recompute(const Problem& p, const QueryTile& q_tile,
                                            const LanePosition& position,
                                            const RowSoftmax<C>& softmax,
                                            RowResults<C::kForward.warp_rows / 16>& result) {
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (needs_recompute<C::kForward.keys, C::kGeneral>(
              p, q_tile, position.row(i, h), softmax.m[i][h], softmax.l[i][h])) [[unlikely]]
        result.lse[i][h] = common::recompute_marker();
    }
  }
}

template <class C>
TILEWISE_COLD void write_exact_row(const ForwardParams& params, const QueryTile& q_tile,
                                   int32_t r) {
  constexpr Form kForm = C::kGeneral ? Form::general : Form::plain;
  const Problem& p = params.problem;
  const tilewise_mask* const mask = C::kMasked ? &params.mask : nullptr;
  const int64_t row = q_tile.rows.first + q_tile.rows.row(r);
  if constexpr (!C::kFloat8) {
    using T = typename C::Storage;
    common::ExactRow<T, T, kForm, C::kMasked>(p, q_tile.sequence, row, q_tile.head(r), mask)
        .write();
  } else if (p.dtype == TILEWISE_BFLOAT16) {
    common::ExactRow<BFloat16, Float8, kForm, C::kMasked>(p, q_tile.sequence, row, q_tile.head(r),
                                                          mask)
        .write();
  } else {
    common::ExactRow<Half, Float8, kForm, C::kMasked>(p, q_tile.sequence, row, q_tile.head(r), mask)
        .write();
  }
}

// Recomputes the marked rows among the warp's own. Called after all rows have been stored, since it
// overwrites them.
template <class C>
TILEWISE_DEVICE void recompute_rows(const ForwardParams& p, const QueryTile& q_tile,
                                    const LanePosition& position,
                                    const RowResults<C::kForward.warp_rows / 16>& result) {
  uint32_t marked = 0;  // one bit per row of this lane
#pragma unroll
  for (int i = 0; i < C::kForward.warp_rows / 16; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (common::is_recompute_marker(result.lse[i][h]) && position.row(i, h) < q_tile.rows.count)
        marked |= 1u << (2 * i + h);
    }
  }
  if (!ptx::any(marked != 0)) [[likely]]
    return;
  ptx::fence_device();
  if constexpr (C::kColumnWarps > 1) sync_column_warps<C>();  // which have marked the same rows
  const int32_t first = ptx::uniform(position.row0);
  const int32_t begin = column_warp<C>() * kOwnRows<C>;
#pragma unroll 1
  for (int32_t r = begin; r < begin + kOwnRows<C>; ++r) {
    const uint32_t owner_marked = ptx::shuffle(marked, r % 8 * 4);
    if ((owner_marked >> (r / 8) & 1u) != 0) write_exact_row<C>(p, q_tile, first + r);
  }
}

}  // namespace tilewise::cuda::mma_sync
