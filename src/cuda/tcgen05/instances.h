// The kernel instances of the tcgen05 family. tools/kernel_instances.cpp prints them for the build.
#pragma once

#include <array>

#include "cuda/arch/blackwell.h"
#include "cuda/kernel_instance.h"

namespace tilewise::cuda::tcgen05 {

inline constexpr std::array kHeadDims = {64, 96, 128};

inline constexpr std::array kTables = {
    TileTable{.name = "Sm100a", .number = arch::Sm100a::kTable, .architectures = "100f-real"},
};

template <class Visit>
constexpr void for_each_instance(Visit&& visit) {
  for (const char* element : {"F16", "BF16"}) {
    for (int head_dim : kHeadDims) {
      visit(KernelInstance{
          .table = "Sm100a", .element = element, .head_dim = head_dim, .head_dim_v = head_dim});
    }
  }
}

}  // namespace tilewise::cuda::tcgen05
