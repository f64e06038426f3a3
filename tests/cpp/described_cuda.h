// A registry of every kernel set of the manifest, without code: the contents of a build for all
// GPUs.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "cuda/arch/hopper.h"
#include "cuda/arch/tables.h"
#include "cuda/element.h"
#include "cuda/kernel_set.h"
#include "cuda/manifest.h"
#include "dispatch/device.h"

namespace tilewise {

template <class Visit>
void with_arch(const char* name, const Visit& visit) {
  const auto is = [&](const char* each) { return std::strcmp(name, each) == 0; };
  if (is("Sm75")) visit(cuda::arch::Sm75{});
  if (is("Sm80")) visit(cuda::arch::Sm80{});
  if (is("Sm86")) visit(cuda::arch::Sm86{});
  if (is("Sm90")) visit(cuda::arch::Sm90{});
  if (is("Sm120")) visit(cuda::arch::Sm120{});
}

inline cuda::KernelSet hopper(cuda::KernelSet table, cuda::arch::TileSize cut) {
  using cuda::arch::Sm90a;
  table.family = cuda::Family::wgmma;
  table.architecture = Sm90a::kTable;
  const auto forward = Sm90a::forward(table.head_dim, table.head_dim_v, cut);
  const auto backward = Sm90a::backward(table.head_dim, cut);
  table.forward_tile = {forward.rows(), forward.keys, 1};
  table.backward_tile = {backward.queries, backward.keys * backward.cluster_size, 1,
                         backward.cluster_size};
  table.persistent_backward = table.head_dim <= 128;
  return table;
}

inline cuda::KernelSet described(const cuda::KernelInstance& kernel_set) {
  const auto is = [&](const char* each) { return std::strcmp(kernel_set.element, each) == 0; };
  cuda::KernelSet table;
  table.dtype = is("F16")    ? TILEWISE_FLOAT16
                : is("BF16") ? TILEWISE_BFLOAT16
                : is("E4M3") ? TILEWISE_FLOAT8_E4M3
                             : TILEWISE_FLOAT32;
  table.tf32 = is("Tf32");
  table.head_dim = kernel_set.head_dim;
  table.head_dim_v = kernel_set.head_dim_v;
  if (std::strcmp(kernel_set.family, "simt") == 0) {
    table.forward_tile = table.backward_tile = {64, 64, 2};
    return table;
  }
  if (std::strcmp(kernel_set.family, "wgmma") == 0) {
    static std::deque<cuda::KernelSet> few_rows;
    few_rows.push_back(hopper(table, cuda::arch::TileSize::small));
    table = hopper(table, cuda::arch::TileSize::large);
    table.few_rows = &few_rows.back();
    return table;
  }
  table.family = cuda::Family::mma_sync;
  const int bytes = is("E4M3") ? 1 : table.dtype == TILEWISE_FLOAT32 ? 4 : 2;
  if (bytes == 2) table.paged.forward.function = [](cuda::ForwardParams) {};
  with_arch(kernel_set.arch, [&]<class Arch>(Arch) {
    table.architecture = Arch::kTable;
    const auto forward = Arch::forward(bytes, kernel_set.head_dim, table.tf32);
    const auto backward = Arch::backward(bytes, kernel_set.head_dim);
    table.forward_tile = {forward.rows(), forward.keys, forward.blocks_per_sm};
    const auto decode = Arch::decode(bytes, kernel_set.head_dim);
    if (decode.warps > 0) {
      static std::deque<cuda::KernelSet> few_rows;
      few_rows.push_back(table);
      few_rows.back().forward_tile = {decode.rows(), decode.keys, decode.blocks_per_sm};
      if (Arch::kTma) {
        for (cuda::FormKernels* form : {&few_rows.back().tma, &few_rows.back().tma_paged})
          form->tma_forward.function = [](cuda::TmaForwardParams) {};
        if (cuda::has_warp_split(kernel_set.head_dim, bytes)) {
          for (cuda::FormKernels* form : {&few_rows.back().tma, &few_rows.back().tma_paged})
            form->tma_forward_warp_split.function = [](cuda::TmaForwardParams) {};
          few_rows.back().paged.forward_warp_split.function = [](cuda::ForwardParams) {};
        }
      }
      table.few_rows = &few_rows.back();
    }
    if (backward.key_warps > 0) {
      table.backward_tile = {backward.queries, backward.keys(), backward.blocks_per_sm};
    }
  });
  return table;
}

struct DescribedBuild {
  std::vector<std::unique_ptr<cuda::KernelSet>> kernel_sets;
  std::vector<const cuda::KernelSet*> pointers;
  std::vector<cuda::Code> code;
  cuda::Registry registry;

  // `code_inside` determines the tables whose kernel sets are in the build; 0 is simt.
  explicit DescribedBuild(std::vector<cuda::Code> code_inside) : code(std::move(code_inside)) {
    cuda::for_each_instance([&](const cuda::KernelInstance& kernel_set) {
      kernel_sets.push_back(std::make_unique<cuda::KernelSet>(described(kernel_set)));
      const int32_t table = kernel_sets.back()->architecture;
      for (const cuda::Code& each : code) {
        if (each.architecture == table) pointers.push_back(kernel_sets.back().get());
      }
    });
    registry = {pointers, code};
  }
};

// A build for every GPU, with the architectures of cmake/TilewiseCuda.cmake.
inline const cuda::Registry& every_gpu() {
  static constexpr int32_t k75[] = {75};
  static constexpr int32_t k80[] = {80};
  static constexpr int32_t k86[] = {86};
  static constexpr int32_t k90[] = {90};
  static constexpr int32_t k90and100[] = {90, 100};
  static constexpr int32_t k120[] = {120};
  static constexpr int32_t kAny[] = {75, 80, 90, 100, 120};
  static constexpr int32_t kAnyPtx[] = {75, 90};
  static const DescribedBuild build({{0, kAny, kAnyPtx},
                                     {75, k75, k75},
                                     {80, k80, k80},
                                     {86, k86, {}},
                                     {90, k90and100, k90},
                                     {120, k120, {}},
                                     {901, k90, {}}});
  return build.registry;
}

inline dispatch::Device gpu_with(int32_t sm, const cuda::Registry& inside = every_gpu()) {
  dispatch::Device device;
  device.kind = TILEWISE_CUDA;
  const int32_t shared = sm >= 75 ? cuda::arch::limits_of(sm).shared_bytes : 48 * 1024;
  device.gpu = {sm, 132, shared, 50 << 20};
  device.inside = &inside;
  return device;
}

}  // namespace tilewise
