// dsinks and dscale: see scalar_gradients.h.
//
//   dsinks[head] = -sum over rows of exp(sink - lse) delta,  delta = do.o - dlse
//
// In Pass::second, with the tangents dout', dlse', o', lse' and sink', delta is
//   do.o - dlse + do'.o' + (sink' - lse') (do'.o - dlse')
//
// dsinks: grid dsinks_blocks(p), a CTA per head and block of kDsinksRows rows; reads out, dout,
// lse, dlse and sinks, writes `partials`. reduce_partials: grid reduce_blocks(params); reads the
// partial sums, writes dsinks and dscale.
#pragma once

#include "attention/online_softmax.h"
#include "cuda/common/block.h"
#include "cuda/common/out.h"
#include "cuda/common/row_location.h"
#include "cuda/common/scalar_gradients.h"
#include "cuda/element.h"

namespace tilewise::cuda::common {

// do.o of one row, computed by a warp, where `out` is out or its tangent and T the storage of dout;
// 0 if dout is absent.
template <class T>
TILEWISE_DEVICE float out_product(const Problem& p, const tilewise_tensor& out,
                                  const tilewise_tensor& dout, const RowLocation& location,
                                  int64_t head) {
  if (dout.data == nullptr) return 0.0f;
  const T* const gradient =
      static_cast<const T*>(dout.data) + location.offset(dout) + head * dout.stride_head;
  return with_out<T>(p, out, location.offset(out) + head * out.stride_head,
                     [&](const auto* row) { return dot_of_warp(row, gradient, p.head_dim_v); });
}

// do.o - dlse of one row, computed by a warp, with dout and dlse of the gradients or the tangents.
template <class T, class From>
TILEWISE_DEVICE float delta_of_warp(const Problem& p, const From& from, const RowLocation& location,
                                    int64_t head) {
  const float delta = out_product<T>(p, p.out, from.dout, location, head);
  if (from.dlse == nullptr) return delta;
  return delta - from.dlse[location.batch_index * from.dlse_stride_batch + location.row +
                           head * from.dlse_stride_head];
}

// A sink has the weight p = exp(sink - lse) and no value, so its ds is -p times this.
template <class T>
TILEWISE_DEVICE float sink_delta_of_warp(const DsinksParams& params, const RowLocation& location,
                                         int64_t head) {
  const Problem& p = params.problem;
  const Tangents& t = params.tangents;
  const float delta = delta_of_warp<T>(p, params.gradients, location, head);
  if (t.dout.data == nullptr) return delta;
  const float lse_tangent =
      t.lse[location.batch_index * t.lse_stride_batch + location.row + head * t.lse_stride_head];
  const float centred = (t.sinks != nullptr ? t.sinks[head] : 0.0f) - lse_tangent;
  return delta + out_product<T>(p, t.out, t.dout, location, head) +
         centred * delta_of_warp<T>(p, t, location, head);
}

// Each warp adds its rows in ascending order; then the sums of the warps are added in order.
template <class Element>
TILEWISE_KERNEL(kDsinksThreads, 1)
void dsinks(TILEWISE_PARAMETER DsinksParams params) {
  constexpr int kWarps = kDsinksThreads / ptx::kWarpSize;
  const Problem& p = params.problem;
  const int64_t head = ptx::block_index() / params.row_blocks;
  const int64_t row_block = ptx::block_index() - head * params.row_blocks;
  const int64_t end = min(total_rows(p), (row_block + 1) * kDsinksRows);
  double sum = 0.0;
  for (int64_t row = row_block * kDsinksRows + ptx::warp_index(); row < end; row += kWarps) {
    const RowLocation location = locate_row(p, row);
    if (!location.in_use) continue;
    const int64_t at =
        location.batch_index * p.lse_stride_batch + location.row + head * p.lse_stride_head;
    const LogSum lse{p.lse[at], p.lse_low != nullptr ? p.lse_low[at] : 0.0f};
    if (lse.lse == kMinusInfinity) continue;  // then the sink is also -inf
    const float delta = sink_delta_of_warp<typename Element::Storage>(params, location, head);
    const float exponent = min(LogSum{p.sinks[head], 0.0f}.above(lse), 0.0f);
    sum -= static_cast<double>(exponential(exponent) * delta);
  }
  auto* const sums = reinterpret_cast<double*>(ptx::shared_memory());
  if (ptx::lane_index() == 0) sums[ptx::warp_index()] = sum;
  ptx::sync_block();
  if (ptx::thread_index() != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp];
  params.partials[ptx::block_index()] = sum;
}

// The sum of `count` numbers by a CTA, in the same order in every run. Thread 0 has the result.
template <class T>
TILEWISE_DEVICE double sum_of_block(const T* x, int64_t count) {
  auto* const sums = reinterpret_cast<double*>(ptx::shared_memory());
  const int thread = ptx::thread_index();
  double sum = 0.0;
  for (int64_t i = thread; i < count; i += kReduceThreads) sum += static_cast<double>(x[i]);
  sums[thread] = sum;
  for (int step = kReduceThreads / 2; step != 0; step /= 2) {
    ptx::sync_block();
    if (thread < step) sums[thread] += sums[thread + step];
  }
  return thread == 0 ? sums[0] : 0.0;  // other threads must not read: thread 0 may still add
}

TILEWISE_KERNEL(kReduceThreads, 1) void reduce_partials(TILEWISE_PARAMETER ReduceParams params) {
  const int64_t block = ptx::block_index();
  const int64_t heads = params.dsinks != nullptr ? params.heads : 0;
  const bool of_sinks = block < heads;
  const double sum =
      of_sinks ? sum_of_block(params.dsinks_partials + block * params.row_blocks, params.row_blocks)
               : sum_of_block(params.dscale_partials, params.dscale_count);
  if (ptx::thread_index() != 0) return;
  *(of_sinks ? params.dsinks + block : params.dscale) = static_cast<float>(sum);
}

}  // namespace tilewise::cuda::common
