// The kernels that every family needs, compiled once (kernels.cu).
#pragma once

#include "cuda/common/append.h"
#include "cuda/common/check.h"
#include "cuda/common/combine.h"
#include "cuda/common/dbias.h"
#include "cuda/common/prepare.h"
#include "cuda/common/sums.h"
#include "cuda/runtime.h"

namespace tilewise::cuda::common {

// Of one element type.
struct TensorKernels {
  Kernel<ForwardParams> combine_splits;
  Kernel<ForwardParams> combine_parts;
  Kernel<AppendParams> append;
  Kernel<DbiasParams> dbias;
  Kernel<DsinksParams> dsinks;
};

// `dtype` is TILEWISE_FLOAT32, TILEWISE_FLOAT16 or TILEWISE_BFLOAT16.
const TensorKernels& tensor_kernels(int32_t dtype);
const Kernel<PrepareParams>& prepare_kernel();
const Kernel<SumsParams>& sums_kernel();
const Kernel<CheckParams>& check_kernel();

}  // namespace tilewise::cuda::common
