// Instantiates the kernels that kernels.h lists.
#include "cuda/common/append.cuh"
#include "cuda/common/check.cuh"
#include "cuda/common/combine.cuh"
#include "cuda/common/dbias.cuh"
#include "cuda/common/kernels.h"
#include "cuda/common/prepare.cuh"
#include "cuda/common/scalar_gradients.cuh"
#include "cuda/common/widen.cuh"

namespace tilewise::cuda::common {
namespace {

TILEWISE_DEVICE_VARIABLE IndexRecord index_record;  // initialised to zeros

// Stream-K tails are those of wgmma's fast path, whose out has 16 bits.
template <class Element>
constexpr Kernel<ForwardParams> combine_shares() {
  if constexpr (Element::kDtype == TILEWISE_FLOAT32)
    return {};
  else
    return {&combine_by_warps<Element, StreamKRow>, kCombineByWarpsThreads, 0};
}

template <class Element>
constexpr TensorKernels kTensorKernels = {
    {&combine<Element, SplitRow>, kCombineThreads, 0},
    {&combine<Element, ChunkRow>, kCombineThreads, 0},
    {&combine_by_warps<Element, SplitRow>, kCombineByWarpsThreads, 0},
    combine_shares<Element>(),
    {&append<Element>, kAppendThreads, kAppendSharedBytes},
    {&dbias<Element>, kDbiasThreads, kDbiasSharedBytes},
    {&dsinks<Element>, kDsinksThreads, kDsinksSharedBytes},
};

}  // namespace

const TensorKernels& tensor_kernels(int32_t dtype) {
  static const TensorKernels kernels[] = {kTensorKernels<F32>, kTensorKernels<F16>,
                                          kTensorKernels<BF16>};
  static_assert(F32::kDtype == 0 && F16::kDtype == 1 && BF16::kDtype == 2);
  return kernels[dtype];
}

const Kernel<PrepareParams>& prepare_kernel() {
  static const Kernel<PrepareParams> kernel = {&prepare, kPrepareThreads, kPrepareSharedBytes};
  return kernel;
}

const Kernel<ReduceParams>& reduce_kernel() {
  static const Kernel<ReduceParams> kernel = {&reduce_partials, kReduceThreads, kReduceSharedBytes};
  return kernel;
}

const Kernel<CheckParams>& check_kernel() {
  static const Kernel<CheckParams> kernel = {&check, kCheckThreads, kCheckSharedBytes};
  return kernel;
}

const Kernel<WidenParams>& widen_kernel() {
  static const Kernel<WidenParams> kernel = {&widen, kWidenThreads, 0};
  return kernel;
}

const void* index_record_symbol() { return &index_record; }

}  // namespace tilewise::cuda::common
