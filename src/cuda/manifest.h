// The manifest: every kernel instance of the CUDA families. The library, the build (through
// tools/kernel_instances.cpp), the tests and the documentation read it from here. One instance is
// one .cu in the build tree, with forward and backward in all forms. A new head dimension is one
// more number in one of these lists.
#pragma once

#include <array>
#include <cstdint>

#include "attention/problem.h"
#include "cuda/arch/tables.h"

namespace tilewise::cuda {

// Compiled head dimensions. A problem takes the first one that is at least as large as both of its
// head dimensions.
inline constexpr std::array kHalfHeadDims = {64, 96, 128, 192, 256};  // F16, BF16
inline constexpr std::array kFloatHeadDims = {64, 128, 256};          // F32, Tf32
inline constexpr std::array kFloat8HeadDims = {64, 128, 256};         // E4M3
inline constexpr std::array kSimtHeadDims = {64, 128, 256, static_cast<int>(kMaxHeadDim)};
// Head dimensions of the wgmma family (F16, BF16).
struct HeadDims {
  int qk;  // of Q and K
  int v;
};
inline constexpr std::array kWgmmaHeadDims = {
    HeadDims{.qk = 64, .v = 64},   HeadDims{.qk = 96, .v = 96},   HeadDims{.qk = 128, .v = 128},
    HeadDims{.qk = 192, .v = 128}, HeadDims{.qk = 192, .v = 192}, HeadDims{.qk = 256, .v = 256},
};

struct KernelInstance {
  const char* family;   // "wgmma", "mma_sync" or "simt"
  const char* arch;     // struct of arch/tables.h or arch/hopper.h; "" for simt
  const char* element;  // struct of element.h
  int head_dim;
  int head_dim_v;
};

template <class Visit>
constexpr void for_each_instance(Visit&& visit) {
  for (const char* arch : {"Sm75", "Sm80", "Sm86", "Sm90", "Sm120"}) {
    const bool turing = arch[2] == '7';
    for (int d : kHalfHeadDims) {
      visit(KernelInstance{"mma_sync", arch, "F16", d, d});
      if (!turing) visit(KernelInstance{"mma_sync", arch, "BF16", d, d});
    }
    for (int d : kFloat8HeadDims) visit(KernelInstance{"mma_sync", arch, "E4M3", d, d});
    for (int d : kFloatHeadDims) {
      if (turing) continue;
      visit(KernelInstance{"mma_sync", arch, "F32", d, d});
      visit(KernelInstance{"mma_sync", arch, "Tf32", d, d});
    }
  }
  for (const char* element : {"F16", "BF16"}) {
    for (HeadDims d : kWgmmaHeadDims) visit(KernelInstance{"wgmma", "Sm90a", element, d.qk, d.v});
  }
  for (const char* element : {"F16", "BF16", "F32"}) {
    for (int d : kSimtHeadDims) visit(KernelInstance{"simt", "", element, d, d});
  }
}

}  // namespace tilewise::cuda
