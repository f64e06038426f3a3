// After the backward: dQ from its sums.
#pragma once

#include "cuda/mma_sync/backward_prepare.cuh"
#include "cuda/ptx/shared.h"

namespace tilewise::cuda::mma_sync {

// dQ = scale * sums, for the rows in use; part of dscale = sum(q dQ / scale); whether the sums are
// finite.
template <class C>
TILEWISE_KERNEL(kFinishThreads, 1)
void backward_finish(TILEWISE_PARAMETER BackwardParams p) {
  using Plan = BackwardPlan<C>;
  using Storage = typename C::Element::Storage;
  constexpr int kBlocks = Plan::kDqColumns / 8;
  const RowBlock<C> block = RowBlock<C>::of(p);
  const int thread = ptx::thread_index();
  if (thread == 0) {
    if (p.dscale_parts != nullptr) p.dscale_parts[block.tile] = 0.0f;
    if (p.row_flags.data != nullptr) p.row_flags.data[block.tile] = 0;
  }
  if (block.batch < 0) return;
  const Problem& problem = p.problem;
  const Sequence s = sequence_of(problem, block.batch);
  const float scale = score_of(problem).scale;
  const auto* q = static_cast<const Storage*>(problem.q.data) + block.head * problem.q.stride_head;
  auto* dq = static_cast<Storage*>(p.gradients.dq.data);
  if (dq != nullptr) dq += block.head * p.gradients.dq.stride_head;

  // Eight rows x two columns of a warp's 16 x 8 block at a time: (row, column), (row, column + 1).
  float dscale = 0.0f;
  bool finite = true;
  const int lane = thread % 32;
  for (int i = thread / 32; i < Plan::kWarps * (Plan::kDqRows / 16) * kBlocks;
       i += kFinishThreads / 32) {
    const int warp = i / (Plan::kDqRows / 16 * kBlocks);
    const int m = i / kBlocks % (Plan::kDqRows / 16);
    const int n = i % kBlocks;
    const float* sums =
        p.dq_sum + block.tile * Plan::kDqTile + warp * (Plan::kDqRows * Plan::kDqColumns);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t row = block.row0 + dq_row<C>(warp, m, e, lane);
      const int column = dq_column<C>(warp, n, e, lane);
      if (row >= s.band.rows || column >= problem.head_dim) continue;
      const float sum = sums[dq_index<C>(m, n, e, lane)];
      finite = finite && sum - sum == 0.0f;
      if (p.dscale_parts != nullptr)
        dscale = ptx::fma(to_float(q[s.row_offset(problem.q, row) + column]), sum, dscale);
      if (dq != nullptr)
        dq[s.row_offset(p.gradients.dq, row) + column] = from_float<Storage>(sum * scale);
    }
  }

  if (p.dscale_parts == nullptr && p.row_flags.data == nullptr) return;
#pragma unroll
  for (int mask = 16; mask != 0; mask /= 2) dscale += ptx::shuffle_xor(dscale, mask);
  const bool spoilt = ptx::any(!finite);
  const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
  if (lane == 0) ptx::st_shared_b32(shared + thread / 32 * 4, ptx::bits_of(dscale));
  ptx::sync_block();
  if (thread == 0 && p.dscale_parts != nullptr) {
    for (int i = 1; i < kFinishThreads / 32; ++i)
      dscale += ptx::float_of(ptx::ld_shared_b32(shared + i * 4));
    p.dscale_parts[block.tile] = dscale;
  }
  if (lane == 0 && spoilt && p.row_flags.data != nullptr) p.row_flags.data[block.tile] = 1;
}

}  // namespace tilewise::cuda::mma_sync
