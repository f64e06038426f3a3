// What one instance of the mma_sync kernels is: architecture, element, head-dim tile and form.
#pragma once

#include <type_traits>

#include "cuda/arch/tables.h"
#include "cuda/element.h"
#include "cuda/form.h"

namespace tilewise::cuda::mma_sync {

// How a forward is cut: for tiles of rows, or for the few rows of decoding.
enum class Cut { usual, decode };

template <class Arch_, class Element_, int kHeadDim_, Form kForm_, Cut kCut_ = Cut::usual>
struct Config {
  using Arch = Arch_;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kGeneral = kForm_ == Form::general;
  static constexpr bool kPaged = kForm_ == Form::paged || kForm_ == Form::paged_boxes;
  static constexpr bool kBoxes = kForm_ == Form::boxes || kForm_ == Form::paged_boxes;
  static constexpr arch::ForwardTile kForward =
      kCut_ == Cut::decode
          ? Arch::decode(Element::kBytes, kHeadDim)
          : Arch::forward(Element::kBytes, kHeadDim, std::is_same_v<Element, Tf32>);
  static constexpr bool kDecodes = kCut_ == Cut::decode;
  // Clusters merge key splits.
  static constexpr bool kMerges = Arch::kBoxCopy && kDecodes && !kGeneral;
  static constexpr bool kSplitOnce = kForward.warps > 0 && kForward.stages == 0;
  static constexpr arch::BackwardTile kBackward = Arch::backward(Element::kBytes, kHeadDim);
  // Pages of fp32 are left to the general form: caches have 16 bits. Boxes are for decoding.
  static constexpr bool kServes =
      kBoxes ? Arch::kBoxCopy && kDecodes : !kPaged || Element::kBytes == 2;
};

// The kernels:
//   forward.cuh            forward<Config>(ForwardParams), of boxes (TmaForwardParams)
//   backward_prepare.cuh   backward_prepare<Config>(BackwardParams)
//   backward_main.cuh      backward<Config>(BackwardParams)
//   backward_finish.cuh    backward_finish<Config>(BackwardParams)

}  // namespace tilewise::cuda::mma_sync
