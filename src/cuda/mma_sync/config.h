// The compile-time configuration of an mma_sync kernel: architecture, element, head-dim tile, form.
#pragma once

#include <type_traits>

#include "cuda/arch/tables.h"
#include "cuda/element.h"
#include "cuda/form.h"
#include "cuda/tile/float8.h"

namespace tilewise::cuda::mma_sync {

// Prefill computes whole tiles of query rows, decode the few query rows of a generation step.
enum class Phase { prefill, decode };

template <class Arch_, class Element_, int kHeadDim_, Form kForm_, Phase kPhase_ = Phase::prefill,
          int kWarpSplits_ = 1>
struct Config {
  using Arch = Arch_;
  using KvElement = Element_;  // element of k and v in memory
  // A float8 cache is multiplied as F16, whether q and out are F16 or BF16.
  static constexpr bool kFloat8 = std::is_same_v<KvElement, E4M3>;
  using Element = std::conditional_t<kFloat8, F16, KvElement>;
  // The element of q and out in memory.
  using Storage = std::conditional_t<kFloat8, EitherHalf, typename Element::Storage>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kGeneral = includes_general(kForm_);
  static constexpr bool kMasked = kForm_ == Form::masked;
  static constexpr bool kPaged = kForm_ == Form::paged || kForm_ == Form::tma_paged;
  static constexpr bool kTma = kForm_ == Form::tma || kForm_ == Form::tma_paged;
  static constexpr arch::ForwardTile kForward =
      kPhase_ == Phase::decode
          ? Arch::decode(KvElement::kBytes, kHeadDim)
          : Arch::forward(KvElement::kBytes, kHeadDim, std::is_same_v<Element, Tf32>);
  static constexpr bool kDecodes = kPhase_ == Phase::decode;
  // Warps that divide the columns of the same rows (forward_column_warps.h), and their columns.
  static constexpr int kColumnWarps = kForward.column_warps;
  static constexpr int kWarpColumns = kHeadDim / kColumnWarps;
  static constexpr bool kLatent = false;  // see LatentConfig
  // Warps that split the keys of a tile (forward_warp_split.h).
  static constexpr int kWarpSplits = kWarpSplits_;
  // Each warp has a pipeline of its own, whose stages have mbarriers (forward_warp_pipeline.h).
  // Such a kernel prefetches the first keys of a sequence before it counts the chunks of its batch,
  // and a cluster or the CTA that finishes last combines its splits.
  static constexpr bool kWarpPipeline = Arch::kTma && kDecodes && !kGeneral;
  static_assert(kWarpSplits == 1 || (kWarpPipeline && kForward.warps == 1));
  static constexpr bool kHasWarpSplit =
      kWarpPipeline && has_warp_split(kHeadDim, KvElement::kBytes);
  // Whether a CTA splits fp32 keys and values into tf32 pairs once, when they arrive.
  static constexpr bool kTf32SplitOnLoad = kForward.warps > 0 && kForward.stages == 0;
  static constexpr arch::BackwardTile kBackward = Arch::backward(KvElement::kBytes, kHeadDim);
  static constexpr bool kConverts = Arch::kConvertsFloat8;
  // A key or value equals its F16 operand times this.
  static constexpr float kKvUnit = kFloat8 ? tile::Float8Pairs<kConverts>::kUnit : 1.0f;
  // The columns of the output that a lane accumulates.
  using Columns = std::conditional_t<kFloat8, tile::FourColumns, tile::TwoColumns>;
  // Which form serves which keys and values, when no option and no alignment needs the general one:
  //
  //   dtype        phase    contiguous  paged
  //   fp16, bf16   prefill  plain       paged
  //   fp16, bf16   decode   tma         tma_paged; paged when pages are smaller than a TMA box
  //   fp32, tf32   both     plain       general
  //   float8       prefill  general     general
  //   float8       decode   tma         tma_paged; general when pages are smaller than a TMA box
  //
  // An architecture without TMA decodes with plain and paged, and float8 with general. With a mask,
  // keys of 16 and 8 bits take the masked form; the simt family serves those of 32 bits.
  static constexpr bool kServes = kTma      ? kWarpPipeline
                                  : kMasked ? Element::kBytes == 2
                                  : kFloat8 ? kGeneral
                                  : kPaged  ? Element::kBytes == 2
                                            : kGeneral || !kWarpPipeline;
};

// The configuration of a forward of a latent cache, whose values are the first kHeadDimV columns of
// its keys (forward_latent_pipeline.h). It has the plain and the paged form.
template <class Arch, class Element, int kHeadDim, int kHeadDimV_, Form kForm, Phase kPhase>
struct LatentConfig : Config<Arch, Element, kHeadDim, kForm, kPhase> {
  static constexpr bool kLatent = true;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr arch::ForwardTile kForward =
      kPhase == Phase::decode ? Arch::latent_decode() : Arch::latent_forward();
  // The column warps divide the columns of the values, and those of the keys that follow them.
  static constexpr int kColumnWarps = kForward.column_warps;
  static constexpr int kWarpColumns = kHeadDimV / kColumnWarps;
  static constexpr bool kWarpPipeline = false;
  static constexpr bool kHasWarpSplit = false;
  static constexpr bool kServes = kForm == Form::plain || kForm == Form::paged;
};

// The configuration of the tangents of out and lse (jvp.cuh): the fast path with tiles of its own.
template <class Arch, class Element, int kHeadDim>
struct JvpConfig : Config<Arch, Element, kHeadDim, Form::plain> {
  static constexpr arch::ForwardTile kForward = arch::jvp_tile<Arch>(Element::kBytes, kHeadDim);
};

// The configuration of the second derivatives of what `Owner` owns (second_owner.h).
template <class Arch, class Element, int kHeadDim, class Owner_>
struct SecondConfig : Config<Arch, Element, kHeadDim, Form::plain> {
  using Owner = Owner_;
  static constexpr arch::ForwardTile kForward =
      Owner::template tile<Arch>(Element::kBytes, kHeadDim);
};

// The kernels:
//   forward.cuh            forward<Config>(ForwardParams; TmaForwardParams in the TMA forms)
//   jvp.cuh                jvp<JvpConfig>(JvpParams)
//   second_prepare.cuh     second_prepare<SecondConfig>(SecondParams)
//   second.cuh             second_keys<SecondConfig>(SecondParams), and second_rows
//   backward_prepare.cuh   backward_prepare<Config>(BackwardParams)
//   backward_main.cuh      backward<Config>(BackwardParams)
//   backward_finish.cuh    backward_finish<Config>(BackwardParams)

}  // namespace tilewise::cuda::mma_sync
