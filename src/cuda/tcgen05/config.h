// One instance of the tcgen05 kernels: element type and head dim.
#pragma once

#include "cuda/arch/blackwell.h"
#include "cuda/element.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/tile/tcgen05_operands.h"

namespace tilewise::cuda::tcgen05 {

template <class Element_, int kHeadDim_>
struct Config {
  using Arch = arch::Sm100a;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr arch::Tcgen05ForwardTile kForward = Arch::forward(kHeadDim);
  static constexpr bool kBf16 = Element::kDtype == TILEWISE_BFLOAT16;
};

// The kernels:
//   forward.cuh   forward<Config>(TmaForwardParams)

}  // namespace tilewise::cuda::tcgen05
