// One instance of the wgmma kernels: element type, head dims, form and tile size.
#pragma once

#include <type_traits>

#include "cuda/arch/hopper.h"
#include "cuda/element.h"
#include "cuda/form.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/swizzled.h"

namespace tilewise::cuda::wgmma {

// In the forward, Form::general of this family also contains what is rare: packed heads, key splits
// and pages. Instructions that are not executed cost time as well, because the instructions of a
// work tile are fetched once per tile (D128, 512 rows, causal: 121 us with 6.5k instructions, 109
// us with 5.0k).
template <class Element_, int kHeadDim_, int kHeadDimV_, Form kForm_, arch::TileSize kTileSize_>
struct Config {
  using Arch = arch::Sm90a;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr bool kGeneral = kForm_ == Form::general;
  static constexpr bool kMasked = kForm_ == Form::masked;
  static constexpr bool kFloat8 = Element::kDtype == TILEWISE_FLOAT8_E4M3;
  // An element of out where q has 16 bits. Where q has 8, out is BF16 or F16: the kernel learns
  // which at run time.
  using Out = std::conditional_t<kFloat8, BF16, Element>;
  static constexpr arch::WgmmaBackwardTile kBackward =
      kFloat8    ? arch::WgmmaBackwardTile{}
      : kMasked  ? Arch::masked_backward(max(kHeadDim, kHeadDimV), kTileSize_)
      : kGeneral ? Arch::general_backward(max(kHeadDim, kHeadDimV), kTileSize_)
                 : Arch::backward(max(kHeadDim, kHeadDimV), kTileSize_);
  // The library has float8 in the fast path alone.
  static constexpr arch::WgmmaForwardTile float8_forward() {
    if (kForm_ != Form::plain) return {};
    return Arch::float8_forward(kHeadDim, kHeadDimV, kTileSize_);
  }
  static constexpr arch::WgmmaForwardTile kForward =
      kFloat8   ? float8_forward()
      : kMasked ? Arch::masked_forward(kHeadDim, kHeadDimV, kTileSize_)
                : Arch::forward(kHeadDim, kHeadDimV, kTileSize_);
  static constexpr ptx::Half16 kHalf =
      Element::kDtype == TILEWISE_BFLOAT16 ? ptx::Half16::bf16 : ptx::Half16::f16;
};

// The kernels:
//   forward.cuh            forward<Config>(TmaForwardParams)
//   transpose_values.cuh   transpose_values<Config>(TransposeParams), before a forward of float8
//   backward_prepare.cuh   backward_prepare<Config>(BackwardParams)
//   backward_main.cuh      backward<Config>(TmaBackwardParams)
//   backward_finish.cuh    backward_finish<Config>(BackwardParams)

}  // namespace tilewise::cuda::wgmma
