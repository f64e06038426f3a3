// The kernel instances of the wgmma family. tools/kernel_instances.cpp prints them for the build.
#pragma once

#include <array>

#include "cuda/arch/hopper.h"
#include "cuda/kernel_instance.h"

namespace tilewise::cuda::wgmma {

struct HeadDims {
  int qk;  // of Q and K
  int v;
};
inline constexpr std::array kHeadDims = {
    HeadDims{.qk = 64, .v = 64},   HeadDims{.qk = 96, .v = 96},   HeadDims{.qk = 128, .v = 128},
    HeadDims{.qk = 192, .v = 128}, HeadDims{.qk = 192, .v = 192}, HeadDims{.qk = 256, .v = 256},
};

// E4M3, forward alone. Beside the sums of 128 columns there is no register for more.
inline constexpr std::array kFloat8HeadDims = {
    HeadDims{.qk = 64, .v = 64}, HeadDims{.qk = 128, .v = 128}, HeadDims{.qk = 192, .v = 128}};

inline constexpr std::array kTables = {
    TileTable{.name = "Sm90a", .number = arch::Sm90a::kTable, .architectures = "90a-real"},
};

template <class Visit>
constexpr void for_each_instance(Visit&& visit) {
  const auto instance = [&](const char* element, const HeadDims& d) {
    visit(
        KernelInstance{.table = "Sm90a", .element = element, .head_dim = d.qk, .head_dim_v = d.v});
  };
  for (const HeadDims& d : kHeadDims) instance("F16", d);
  for (const HeadDims& d : kHeadDims) instance("BF16", d);
  for (const HeadDims& d : kFloat8HeadDims) instance("E4M3", d);
}

}  // namespace tilewise::cuda::wgmma
