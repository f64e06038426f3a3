// What one instance of the simt kernels is: the element in memory and the head-dim tile. Arithmetic
// is fp32 whatever the element, on CUDA cores, on every GPU from sm_60 on.
#pragma once

#include "cuda/element.h"

namespace tilewise::cuda::simt {

// Every product is a kTile x kTile tile of results, held by kThreads threads as 4x4 blocks.
inline constexpr int kTile = 64;
inline constexpr int kThreads = 256;
// Longest chain of additions in a product, as on the CPU: rounding errors grow with its length.
inline constexpr int kChain = 32;

template <class Element_, int kHeadDim_>
struct Config {
  using Element = Element_;
  using Storage = typename Element::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kHeadDim / kTile;  // tiles of columns of an accumulator
  static_assert(kHeadDim % kTile == 0);
  // 16 accumulators a thread and group: two blocks of a multiprocessor have 128 registers each.
  static constexpr int kBlocksPerSm = kGroups <= 2 ? 2 : 1;
};

// The kernels; all take kThreads threads and kSharedBytes of shared memory (shared.h):
//   forward.cuh   forward<Config>(ForwardParams)
//   backward.cuh  backward_prepare<Config>, backward_keys<Config>, backward_rows<Config>
//                 (BackwardParams)

}  // namespace tilewise::cuda::simt
