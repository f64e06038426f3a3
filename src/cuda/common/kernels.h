// The kernels that every family uses, compiled once (kernels.cu).
#pragma once

#include "cuda/common/append.h"
#include "cuda/common/check.h"
#include "cuda/common/combine.h"
#include "cuda/common/dbias.h"
#include "cuda/common/prepare.h"
#include "cuda/common/scalar_gradients.h"
#include "cuda/common/widen.h"
#include "cuda/runtime.h"

namespace tilewise::cuda::common {

// The kernels of one element type: for those that combine it is that of out, for the others of q.
struct TensorKernels {
  Kernel<ForwardParams> combine_splits;
  Kernel<ForwardParams> combine_chunks;
  Kernel<ForwardParams> combine_splits_by_warps;
  Kernel<ForwardParams> combine_shares;  // null for F32
  Kernel<AppendParams> append;
  Kernel<DbiasParams> dbias;
  Kernel<DsinksParams> dsinks;

  // The combine kernel of a launch. Threads and shared memory of combine_chunks and combine_splits
  // depend on the launch, and are set here.
  Kernel<ForwardParams> combine(const ForwardParams& p) const {
    if (p.stream_k.any()) return combine_shares;
    if (combines_by_warps(p)) return combine_splits_by_warps;
    Kernel<ForwardParams> kernel = p.chunks.any() ? combine_chunks : combine_splits;
    kernel.threads = combine_groups(p) * kCombineThreads;
    kernel.shared_bytes = 2 * kCombineGroupsBytes + kernel.threads * 16;
    return kernel;
  }
};

// `dtype` is TILEWISE_FLOAT32, TILEWISE_FLOAT16 or TILEWISE_BFLOAT16.
const TensorKernels& tensor_kernels(int32_t dtype);
const Kernel<PrepareParams>& prepare_kernel();
const Kernel<ReduceParams>& reduce_kernel();
const Kernel<CheckParams>& check_kernel();
const Kernel<WidenParams>& widen_kernel();

// Symbol of the IndexRecord that each GPU has (runtime.h: address_on_device).
const void* index_record_symbol();

}  // namespace tilewise::cuda::common
