// The kernels that one kernel instance gives to the host, and the registry of this build's
// instances.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/backend.h"
#include "cuda/params.h"

namespace tilewise::cuda {

struct Tile {
  int32_t rows = 0;
  int32_t keys = 0;
  int32_t blocks_per_sm = 1;
  int32_t cluster_size = 1;  // CTAs that share a tile
};

// The kernels of one form. A null function means that this build has no such kernel.
struct FormKernels {
  Kernel<ForwardParams> forward;
  Kernel<BackwardParams> prepare;
  Kernel<BackwardParams> backward;
  Kernel<BackwardParams> finish;
  // Instead of `forward` and `backward` where tensors are loaded by TMA.
  Kernel<TmaForwardParams> tma_forward = {};
  // Decoding with kMaxWarpsPerTile warps per tile.
  Kernel<TmaForwardParams> tma_forward_warp_split = {};
  Kernel<ForwardParams> forward_warp_split = {};
  Kernel<TmaBackwardParams> tma_backward = {};
  // Before `tma_forward` where values are float8.
  Kernel<TransposeParams> transpose_values = {};
  Kernel<JvpParams> jvp = {};
  // Pass::second, as `prepare`, `backward` and `finish`. second_dbias is null if these take no
  // bias.
  Kernel<SecondParams> second_prepare = {};
  Kernel<SecondParams> second = {};
  Kernel<SecondParams> second_finish = {};
  Kernel<SecondParams> second_dbias = {};
  Tile forward_tile = {};  // no rows: that of the kernel set
};

// Where kernels read values: in v, or in the first columns of the keys (`values_are_in_keys`).
enum class ValuesIn { own_tensor, key_columns };

struct KernelSet {
  const FamilyRow* family = nullptr;
  int32_t architecture = 0;  // tile table; 0 in a family without tables
  int32_t dtype = 0;
  bool tf32 = false;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  ValuesIn values = ValuesIn::own_tensor;
  Tile forward_tile;
  Tile backward_tile;
  FormKernels plain;
  FormKernels general;  // may be the same as `plain`
  FormKernels masked = {};
  FormKernels paged = {};            // forward only
  FormKernels tma = {};              // decode forward only
  FormKernels tma_paged = {};        // likewise
  bool persistent_backward = false;  // a smaller grid may compute all tiles
  int32_t prepare_splits = 1;        // CTAs of the prepare kernel per row tile
  // The kernels with smaller tiles, for problems with few rows above all; null: none.
  const KernelSet* few_rows = nullptr;
  // The kernels of Pass::jvp and Pass::second if their tiles are not those of the forward and the
  // backward; null: this set has them.
  const KernelSet* tangents = nullptr;

  const FormKernels& form(Form which) const {
    switch (which) {
      case Form::plain:
        return plain;
      case Form::general:
        return general;
      case Form::masked:
        return masked;
      case Form::paged:
        return paged;
      case Form::tma:
        return tma;
      case Form::tma_paged:
        return tma_paged;
    }
    return general;
  }
  const Tile& forward_tile_of(Form which) const {
    const Tile& own = form(which).forward_tile;
    return own.rows > 0 ? own : forward_tile;
  }
  bool reads_mask_forward() const {
    return masked.forward.function != nullptr || masked.tma_forward.function != nullptr;
  }
  bool reads_mask_backward() const {
    return masked.backward.function != nullptr || masked.tma_backward.function != nullptr;
  }
  bool has_plain_forward() const {
    return plain.forward.function != nullptr || plain.tma_forward.function != nullptr;
  }
  bool has_forward() const { return forward_tile.rows > 0; }
  bool has_backward() const { return backward_tile.rows > 0; }
  const KernelSet& of_tangents() const { return tangents != nullptr ? *tangents : *this; }
  bool has_jvp() const { return of_tangents().plain.jvp.function != nullptr; }
  bool has_second() const { return of_tangents().plain.second.function != nullptr; }
};

// The machine code of a tile table (0: kernels without one), as compute capabilities (major * 10 +
// minor).
struct Code {
  int32_t architecture;
  std::span<const int32_t> sass;
  std::span<const int32_t> ptx;
};

// Whether a GPU runs the code. SASS runs on GPUs of its own major version and the same or a higher
// minor version, PTX on any GPU of its own version or a higher one.
constexpr bool runs_on(const Code& code, int32_t sm) {
  for (int32_t target : code.sass) {
    if (target / 10 == sm / 10 && target <= sm) return true;
  }
  for (int32_t target : code.ptx) {
    if (target <= sm) return true;
  }
  return false;
}

struct Registry {
  std::span<const KernelSet* const> kernel_sets;
  std::span<const Code> code;
  bool emulated = false;  // the emulator runs every kernel, independent of `code`

  // Whether a GPU of this compute capability can run the kernels of a tile table.
  bool runs(int32_t architecture, int32_t sm) const {
    for (const Code& entry : code) {
      if (entry.architecture == architecture) return emulated || runs_on(entry, sm);
    }
    return false;
  }
};

// The registry of this build, generated by cmake/TilewiseCuda.cmake; empty without CUDA.
const Registry& registry();

}  // namespace tilewise::cuda
