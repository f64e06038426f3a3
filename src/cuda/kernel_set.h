// What the compiled units hand to the host, and what is inside this build.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/backend.h"
#include "cuda/params.h"

namespace tilewise::cuda {

// One form of the kernels of a unit. simt: `backward` is the kernel of the keys, `finish` that of
// the rows. A null function: this build has no such kernel.
struct FormKernels {
  Kernel<ForwardParams> forward;
  Kernel<BackwardParams> prepare;
  Kernel<BackwardParams> backward;
  Kernel<BackwardParams> finish;
  Kernel<TmaForwardParams> tma_forward = {};  // wgmma and boxes: instead of the ones above
  // Decoding from boxes or pages: kMaxWarpsPerTile share a tile.
  Kernel<TmaForwardParams> tma_forward_warp_split = {};
  Kernel<ForwardParams> forward_warp_split = {};
  Kernel<TmaBackwardParams> tma_backward = {};
};

struct Tile {
  int32_t rows = 0;
  int32_t keys = 0;
  int32_t blocks_per_sm = 1;
  int32_t cluster_size = 1;  // CTAs that share a tile
};

struct KernelSet {
  Family family = Family::simt;
  int32_t architecture = 0;  // tile table; 0 for simt, which has none
  int32_t dtype = 0;
  bool tf32 = false;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  Tile forward_tile;
  Tile backward_tile;
  FormKernels plain;
  FormKernels general;     // simt: the same as `plain`
  FormKernels paged = {};  // mma_sync, of 16 bits: a forward
  FormKernels tma = {};    // the same, of few rows
  FormKernels tma_paged = {};
  bool persistent_backward = false;  // a smaller grid may share the work
  int32_t prepare_splits = 1;        // blocks of the prepare kernel that share a tile of rows
  // The same for problems of few rows, where that pass has a cut of its own for them; null: none.
  const KernelSet* few_rows = nullptr;

  const FormKernels& form(Form which) const {
    switch (which) {
      case Form::plain:
        return plain;
      case Form::general:
        return general;
      case Form::paged:
        return paged;
      case Form::tma:
        return tma;
      case Form::tma_paged:
        return tma_paged;
    }
    return general;
  }
  bool has_forward() const { return forward_tile.rows > 0; }
  bool has_backward() const { return backward_tile.rows > 0; }
};

// The machine code of a tile table (0: simt and common): compute capabilities as major * 10 +
// minor.
struct Code {
  int32_t architecture;
  std::span<const int32_t> sass;
  std::span<const int32_t> ptx;
};

// SASS runs on its own major version from its own minor version on; PTX from its own version on.
constexpr bool runs_on(const Code& code, int32_t sm) {
  for (int32_t each : code.sass) {
    if (each / 10 == sm / 10 && each <= sm) return true;
  }
  for (int32_t each : code.ptx) {
    if (each <= sm) return true;
  }
  return false;
}

struct Registry {
  std::span<const KernelSet* const> kernel_sets;
  std::span<const Code> code;
  bool emulated = false;  // runs on the CPU whatever `code` says

  // Whether a GPU of this compute capability can run the kernels of a tile table (0: simt).
  bool runs(int32_t architecture, int32_t sm) const {
    for (const Code& each : code) {
      if (each.architecture == architecture) return emulated || runs_on(each, sm);
    }
    return false;
  }
};

// Written by the build (cmake/TilewiseCuda.cmake); empty in a build without CUDA.
const Registry& registry();

}  // namespace tilewise::cuda
