// The kernel instances of the simt family. tools/kernel_instances.cpp prints them for the build.
#pragma once

#include <array>

#include "cuda/kernel_instance.h"

namespace tilewise::cuda::simt {

inline constexpr std::array kHeadDims = {64, 128, 256, 512};

// F16 and BF16 of a latent cache, forward alone.
inline constexpr int kWideHeadDim = 576;

// The family runs on every GPU, so it has no tiles per architecture. The kernels that all families
// share (src/cuda/common) are compiled for the same architectures.
inline constexpr std::array kTables = {
    TileTable{.name = "any",
              .number = 0,
              .architectures = "75-real 80-real 90-real 100-real 120-real 75-virtual"},
};

template <class Visit>
constexpr void for_each_instance(Visit&& visit) {
  for (const char* element : {"F16", "BF16", "F32"}) {
    for (int d : kHeadDims) {
      visit(KernelInstance{.table = "any", .element = element, .head_dim = d, .head_dim_v = d});
    }
  }
  for (const char* element : {"F16", "BF16"}) {
    visit(KernelInstance{
        .table = "any", .element = element, .head_dim = kWideHeadDim, .head_dim_v = kWideHeadDim});
  }
}

}  // namespace tilewise::cuda::simt
