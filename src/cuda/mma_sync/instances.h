// The kernel instances of the mma_sync family. tools/kernel_instances.cpp prints them for the
// build. A new head dimension is one more number in one of these lists.
#pragma once

#include <array>

#include "cuda/arch/tables.h"
#include "cuda/kernel_instance.h"

namespace tilewise::cuda::mma_sync {

inline constexpr std::array kHalfHeadDims = {64, 96, 128, 192, 256};  // F16, BF16
inline constexpr std::array kFloatHeadDims = {64, 128, 256};          // F32, Tf32
inline constexpr std::array kFloat8HeadDims = {64, 128, 256};         // E4M3

// F16 and BF16 with two column warps, not on sm_75.
inline constexpr std::array kWideHeadDims = {384, 512};

// The tables whose shared memory also holds the tiles of such a backward.
constexpr bool has_wide_backward(int table) {
  return table == arch::Sm80::kTable || table == arch::Sm90::kTable;
}

// F16 and BF16 of a latent cache (LatentConfig): columns of keys, of which the first are the
// values. Forward alone and not on sm_75.
inline constexpr int kLatentHeadDim = 576;
inline constexpr int kLatentHeadDimV = 512;

// The head dimensions that have a jvp, though not on sm_75.
inline constexpr std::array kTangentHeadDims = {64, 128};

inline constexpr std::array kTables = {
    TileTable{.name = "Sm75", .number = arch::Sm75::kTable, .architectures = "75-real 75-virtual"},
    TileTable{.name = "Sm80", .number = arch::Sm80::kTable, .architectures = "80-real 80-virtual"},
    TileTable{.name = "Sm86", .number = arch::Sm86::kTable, .architectures = "86-real"},
    TileTable{.name = "Sm90",
              .number = arch::Sm90::kTable,
              .architectures = "90-real 100-real 90-virtual"},
    TileTable{.name = "Sm120", .number = arch::Sm120::kTable, .architectures = "120-real"},
};

template <class Visit>
constexpr void for_each_instance(Visit&& visit) {
  for (const TileTable& table : kTables) {
    const auto instance = [&](const char* element, int head_dim, const char* ptxas = "") {
      visit(KernelInstance{.table = table.name,
                           .element = element,
                           .head_dim = head_dim,
                           .head_dim_v = head_dim,
                           .ptxas = ptxas});
    };
    const bool turing = table.number == arch::Sm75::kTable;  // fp16 only
    for (int d : kHalfHeadDims) {
      instance("F16", d);
      if (!turing) instance("BF16", d);
    }
    for (int d : kWideHeadDims) {
      if (turing) continue;
      instance("F16", d);
      instance("BF16", d);
    }
    for (const char* element : {"F16", "BF16"}) {
      if (turing) continue;
      visit(KernelInstance{.table = table.name,
                           .element = element,
                           .head_dim = kLatentHeadDim,
                           .head_dim_v = kLatentHeadDimV});
    }
    for (int d : kFloat8HeadDims) instance("E4M3", d);
    for (int d : kFloatHeadDims) {
      if (turing) continue;
      // At level 1 ptxas keeps the order of the products that the fp32 kernels choose. Where
      // registers are scarce, higher levels reorder them into dependent chains and spill.
      instance("F32", d, d > 64 ? "-O1" : "");
      instance("Tf32", d);
    }
  }
}

}  // namespace tilewise::cuda::mma_sync
