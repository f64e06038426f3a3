// One instance of the simt kernels: the element type in memory and the head-dim tile. The
// arithmetic is fp32 on CUDA cores for every element type; it runs on every GPU from sm_60 on.
#pragma once

#include "cuda/element.h"

namespace tilewise::cuda::simt {

// Every matrix product has a kTile x kTile result, which kThreads threads hold as 4x4 blocks.
inline constexpr int kTile = 64;
inline constexpr int kThreads = 256;
// Longest chain of additions in a product, as on the CPU, since rounding errors grow with it.
inline constexpr int kChain = 32;

template <class Element_, int kHeadDim_>
struct Config {
  using Element = Element_;
  using Storage = typename Element::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kHeadDim / kTile;  // tiles of columns of an accumulator
  static_assert(kHeadDim % kTile == 0);
  // 16 accumulators per thread and group. With two CTAs per SM a thread has 128 registers.
  static constexpr int kBlocksPerSm = kGroups <= 2 ? 2 : 1;
};

// The kernels; all take kThreads threads and kSharedBytes of shared memory (rows.h):
//   forward.cuh   forward<Config>(ForwardParams)
//   backward.cuh  backward_prepare<Config>, backward_keys<Config>, backward_rows<Config>
//                 (BackwardParams)
//   jvp.cuh       jvp<Config>(JvpParams), with kSharedBytesOfTangents (score_tangents.h)
//   second.cuh    second_prepare<Config>, and with kSecondSharedBytes second_keys<Config>,
//                 second_rows<Config>, second_dbias<Config> (SecondParams)

}  // namespace tilewise::cuda::simt
