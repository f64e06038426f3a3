// A registry of every kernel set that the families list in instances.h, without code: the contents
// of a build for all GPUs.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "cuda/arch/blackwell.h"
#include "cuda/arch/hopper.h"
#include "cuda/arch/tables.h"
#include "cuda/element.h"
#include "cuda/kernel_set.h"
#include "cuda/mma_sync/family.h"
#include "cuda/mma_sync/instances.h"
#include "cuda/simt/family.h"
#include "cuda/simt/instances.h"
#include "cuda/tcgen05/family.h"
#include "cuda/tcgen05/instances.h"
#include "cuda/wgmma/family.h"
#include "cuda/wgmma/instances.h"
#include "dispatch/device.h"

namespace tilewise {

template <class Visit>
void with_arch(const char* name, const Visit& visit) {
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("Sm75")) visit(cuda::arch::Sm75{});
  if (is("Sm80")) visit(cuda::arch::Sm80{});
  if (is("Sm86")) visit(cuda::arch::Sm86{});
  if (is("Sm90")) visit(cuda::arch::Sm90{});
  if (is("Sm120")) visit(cuda::arch::Sm120{});
}

inline cuda::KernelSet hopper(cuda::KernelSet set, cuda::arch::TileSize size) {
  using cuda::arch::Sm90a;
  set.architecture = Sm90a::kTable;
  if (set.dtype == TILEWISE_FLOAT8_E4M3) {
    const auto forward = Sm90a::float8_forward(set.head_dim, set.head_dim_v, size);
    set.forward_tile = {.rows = forward.rows(), .keys = forward.keys, .blocks_per_sm = 1};
    set.plain.tma_forward.function = [](cuda::TmaForwardParams) {};
    return set;
  }
  const auto forward = Sm90a::forward(set.head_dim, set.head_dim_v, size);
  const auto backward = Sm90a::backward(set.head_dim, size);
  const auto masked = Sm90a::masked_forward(set.head_dim, set.head_dim_v, size);
  set.forward_tile = {.rows = forward.rows(), .keys = forward.keys, .blocks_per_sm = 1};
  set.masked.forward_tile = {.rows = masked.rows(), .keys = masked.keys, .blocks_per_sm = 1};
  set.backward_tile = {.rows = backward.queries,
                       .keys = backward.keys * backward.cluster_size,
                       .blocks_per_sm = 1,
                       .cluster_size = backward.cluster_size};
  set.persistent_backward = max(set.head_dim, set.head_dim_v) <= 128;
  if (masked.consumer_warpgroups > 0)
    set.masked.tma_forward.function = [](cuda::TmaForwardParams) {};
  if (Sm90a::masked_backward(max(set.head_dim, set.head_dim_v), size).keys > 0)
    set.masked.tma_backward.function = [](cuda::TmaBackwardParams) {};
  return set;
}

// Visits the instances of all families, each with the row of its family.
template <class Visit>
void for_each_instance(const Visit& visit) {
  using namespace cuda;
  const auto visit_as = [&](const FamilyRow& family) {
    return [&](const KernelInstance& instance) { visit(family, instance); };
  };
  mma_sync::for_each_instance(visit_as(mma_sync::kFamily));
  wgmma::for_each_instance(visit_as(wgmma::kFamily));
  tcgen05::for_each_instance(visit_as(tcgen05::kFamily));
  simt::for_each_instance(visit_as(simt::kFamily));
}

// The kernels of tangents that `set` has beside its own; null: none.
template <class Arch>
const cuda::KernelSet* described_tangents(const cuda::KernelSet& set, int bytes) {
  const auto jvp = cuda::arch::jvp_tile<Arch>(bytes, set.head_dim);
  if (jvp.warps == 0) return nullptr;
  const auto rows = cuda::arch::second_rows_tile<Arch>(bytes, set.head_dim);
  const auto keys = cuda::arch::second_keys_tile<Arch>(bytes, set.head_dim);
  static std::deque<cuda::KernelSet> tangents;
  cuda::KernelSet& kernels = tangents.emplace_back(set);
  kernels.forward_tile = {.rows = jvp.rows(), .keys = jvp.keys, .blocks_per_sm = jvp.blocks_per_sm};
  kernels.backward_tile = {
      .rows = rows.rows(), .keys = keys.rows(), .blocks_per_sm = rows.blocks_per_sm};
  kernels.plain.jvp.function = [](cuda::JvpParams) {};
  kernels.plain.second.function = [](cuda::SecondParams) {};
  return &kernels;
}

inline cuda::KernelSet described(const cuda::FamilyRow& family,
                                 const cuda::KernelInstance& instance) {
  const auto is = [&](const char* other) { return std::strcmp(instance.element, other) == 0; };
  cuda::KernelSet set;
  set.dtype = is("F16")    ? TILEWISE_FLOAT16
              : is("BF16") ? TILEWISE_BFLOAT16
              : is("E4M3") ? TILEWISE_FLOAT8_E4M3
                           : TILEWISE_FLOAT32;
  set.tf32 = is("Tf32");
  set.head_dim = instance.head_dim;
  set.head_dim_v = instance.head_dim_v;
  set.family = &family;
  if (&family == &cuda::simt::kFamily) {
    set.forward_tile = set.backward_tile = {.rows = 64, .keys = 64, .blocks_per_sm = 2};
    set.plain.jvp.function = set.general.jvp.function = [](cuda::JvpParams) {};
    set.plain.second.function = set.general.second.function = [](cuda::SecondParams) {};
    return set;
  }
  if (&family == &cuda::wgmma::kFamily) {
    static std::deque<cuda::KernelSet> few_rows;
    few_rows.push_back(hopper(set, cuda::arch::TileSize::small));
    set = hopper(set, cuda::arch::TileSize::large);
    set.few_rows = &few_rows.back();
    return set;
  }
  if (&family == &cuda::tcgen05::kFamily) {
    const auto forward = cuda::arch::Sm100a::forward(set.head_dim);
    set.architecture = cuda::arch::Sm100a::kTable;
    set.forward_tile = {.rows = forward.rows(), .keys = forward.keys, .blocks_per_sm = 1};
    return set;
  }
  const int bytes = is("E4M3") ? 1 : set.dtype == TILEWISE_FLOAT32 ? 4 : 2;
  if (bytes == 2) set.paged.forward.function = [](cuda::ForwardParams) {};
  const bool latent = instance.head_dim_v < instance.head_dim;
  if (latent) set.values = cuda::ValuesIn::key_columns;
  if (bytes <= 2 && !latent) {
    set.masked.forward.function = [](cuda::ForwardParams) {};
    set.masked.backward.function = [](cuda::BackwardParams) {};
  }
  with_arch(instance.table, [&]<class Arch>(Arch) {
    set.architecture = Arch::kTable;
    const auto forward =
        latent ? Arch::latent_forward() : Arch::forward(bytes, instance.head_dim, set.tf32);
    const auto backward = Arch::backward(bytes, instance.head_dim);
    set.forward_tile = {
        .rows = forward.rows(), .keys = forward.keys, .blocks_per_sm = forward.blocks_per_sm};
    const auto decode = latent ? Arch::latent_decode() : Arch::decode(bytes, instance.head_dim);
    if (decode.warps > 0) {
      static std::deque<cuda::KernelSet> few_rows;
      few_rows.push_back(set);
      few_rows.back().forward_tile = {
          .rows = decode.rows(), .keys = decode.keys, .blocks_per_sm = decode.blocks_per_sm};
      if (Arch::kTma && !latent) {
        for (cuda::FormKernels* form : {&few_rows.back().tma, &few_rows.back().tma_paged})
          form->tma_forward.function = [](cuda::TmaForwardParams) {};
        if (cuda::has_warp_split(instance.head_dim, bytes)) {
          for (cuda::FormKernels* form : {&few_rows.back().tma, &few_rows.back().tma_paged})
            form->tma_forward_warp_split.function = [](cuda::TmaForwardParams) {};
          few_rows.back().paged.forward_warp_split.function = [](cuda::ForwardParams) {};
        }
      }
      set.few_rows = &few_rows.back();
    }
    set.tangents = described_tangents<Arch>(set, bytes);
    if (backward.key_warps > 0) {
      set.backward_tile = {.rows = backward.queries,
                           .keys = backward.keys(),
                           .blocks_per_sm = backward.blocks_per_sm};
    }
  });
  return set;
}

struct DescribedBuild {
  std::vector<std::unique_ptr<cuda::KernelSet>> kernel_sets;
  std::vector<const cuda::KernelSet*> pointers;
  std::vector<cuda::Code> code;
  cuda::Registry registry;

  // The build has the kernel sets of the tile tables in `code_in_build`; table 0 is simt.
  explicit DescribedBuild(std::vector<cuda::Code> code_in_build) : code(std::move(code_in_build)) {
    for_each_instance([&](const cuda::FamilyRow& family, const cuda::KernelInstance& instance) {
      kernel_sets.push_back(std::make_unique<cuda::KernelSet>(described(family, instance)));
      const int32_t table = kernel_sets.back()->architecture;
      for (const cuda::Code& entry : code) {
        if (entry.architecture == table) pointers.push_back(kernel_sets.back().get());
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
  static constexpr int32_t k100[] = {100};
  static constexpr int32_t k90and100[] = {90, 100};
  static constexpr int32_t k120[] = {120};
  static constexpr int32_t kAny[] = {75, 80, 90, 100, 120};
  static constexpr int32_t kAnyPtx[] = {75, 90};
  static const DescribedBuild build({{.architecture = 0, .sass = kAny, .ptx = kAnyPtx},
                                     {.architecture = 75, .sass = k75, .ptx = k75},
                                     {.architecture = 80, .sass = k80, .ptx = k80},
                                     {.architecture = 86, .sass = k86, .ptx = {}},
                                     {.architecture = 90, .sass = k90and100, .ptx = k90},
                                     {.architecture = 120, .sass = k120, .ptx = {}},
                                     {.architecture = 901, .sass = k90, .ptx = {}},
                                     {.architecture = 1001, .sass = k100, .ptx = {}}});
  return build.registry;
}

// The sizes are those of an H100 or H200, with the shared memory of `sm`.
inline dispatch::Device gpu_with(int32_t sm, const cuda::Registry& registry = every_gpu()) {
  dispatch::Device device;
  device.kind = TILEWISE_CUDA;
  const int32_t shared = sm >= 75 ? cuda::arch::limits_of(sm).shared_bytes : 48 * 1024;
  device.gpu = {.sm = sm, .sm_count = 132, .shared_bytes = shared, .l2_bytes = 50 << 20};
  device.registry = &registry;
  return device;
}

}  // namespace tilewise
