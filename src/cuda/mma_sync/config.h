// What one instance of the mma_sync kernels is: architecture, element, head-dim tile and form.
#pragma once

#include <type_traits>

#include "cuda/arch/tables.h"
#include "cuda/element.h"
#include "cuda/form.h"
#include "cuda/tile/float8.h"

namespace tilewise::cuda::mma_sync {

// Prefill: whole tiles of query rows. Decode: the few query rows of generation.
enum class Phase { prefill, decode };

template <class Arch_, class Element_, int kHeadDim_, Form kForm_, Phase kPhase_ = Phase::prefill,
          int kWarpSplits_ = 1>
struct Config {
  using Arch = Arch_;
  using KvElement = Element_;  // what keys and values are in memory
  // They are multiplied as F16, whichever 16 bits q and out have.
  static constexpr bool kFloat8 = std::is_same_v<KvElement, E4M3>;
  using Element = std::conditional_t<kFloat8, F16, KvElement>;
  using Storage = std::conditional_t<kFloat8, EitherHalf, typename Element::Storage>;  // of q, out
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kGeneral = kForm_ == Form::general;
  static constexpr bool kPaged = kForm_ == Form::paged || kForm_ == Form::tma_paged;
  static constexpr bool kTma = kForm_ == Form::tma || kForm_ == Form::tma_paged;
  static constexpr arch::ForwardTile kForward =
      kPhase_ == Phase::decode
          ? Arch::decode(KvElement::kBytes, kHeadDim)
          : Arch::forward(KvElement::kBytes, kHeadDim, std::is_same_v<Element, Tf32>);
  static constexpr bool kDecodes = kPhase_ == Phase::decode;
  static constexpr int kWarpSplits =
      kWarpSplits_;  // warps that share the keys (forward_warp_split.h)
  // Each warp has a ring of its own, whose stages have barriers (forward_warp_pipeline.h). Then it
  // asks for the first keys of a sequence before it counts the parts of its batch, and clusters or
  // last blocks merge key splits.
  static constexpr bool kWarpPipeline = Arch::kTma && kDecodes && !kGeneral;
  static_assert(kWarpSplits == 1 || (kWarpPipeline && kForward.warps == 1));
  static constexpr bool kHasWarpSplit =
      kWarpPipeline && has_warp_split(kHeadDim, KvElement::kBytes);
  static constexpr bool kTf32SplitOnLoad = kForward.warps > 0 && kForward.stages == 0;
  static constexpr arch::BackwardTile kBackward = Arch::backward(KvElement::kBytes, kHeadDim);
  static constexpr bool kConverts = Arch::kConvertsFloat8;
  // A key or value is this many times its operand.
  static constexpr float kKvUnit = kFloat8 ? tile::Float8Pairs<kConverts>::kUnit : 1.0f;
  // What a lane has of its sums over values.
  using Columns = std::conditional_t<kFloat8, tile::FourColumns, tile::TwoColumns>;
  // Pages of fp32 are left to the general form, and so is all of float8 but boxes: caches have 16
  // bits or are decoded from. Boxes are for decoding, and what they cannot read is general.
  static constexpr bool kServes = kTma      ? kWarpPipeline
                                  : kFloat8 ? kGeneral
                                  : kPaged  ? Element::kBytes == 2
                                            : kGeneral || !kWarpPipeline;
};

// The kernels:
//   forward.cuh            forward<Config>(ForwardParams), of boxes (TmaForwardParams)
//   backward_prepare.cuh   backward_prepare<Config>(BackwardParams)
//   backward_main.cuh      backward<Config>(BackwardParams)
//   backward_finish.cuh    backward_finish<Config>(BackwardParams)

}  // namespace tilewise::cuda::mma_sync
