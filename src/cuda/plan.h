// The planner of the CUDA backend, over any registry of units: tests plan for builds and GPUs they
// do not have. Everything here is a pure function of its arguments and reads no index array.
#pragma once

#include "cuda/backend.h"
#include "cuda/kernel_set.h"
#include "cuda/params.h"

namespace tilewise::cuda {

// The unit that serves the pass of a problem; null: none. The tile table is the GPU's own (or the
// forced one); when this build lacks it, the nearest lower one that the GPU can run and hold.
const KernelSet* find_forward(const Problem& p, Family family, const Gpu& gpu,
                              const Registry& registry);
const KernelSet* find_backward(const Problem& p, const Gradients* g, Family family, const Gpu& gpu,
                               const Registry& registry);

Plan plan_forward(const Problem& p, Family family, const Gpu& gpu, const Registry& registry);
Plan plan_backward(const Problem& p, const Gradients& g, Family family, const Gpu& gpu,
                   const Registry& registry);

// Whether the kernels' plain form serves: nothing general is asked for and every row that is read
// or written starts at a multiple of 16 bytes. Of the backward when `g` is given.
bool fits_plain(const Problem& p, const Gradients* g);

// The form that serves a forward.
Form forward_form(const Problem& p, const KernelSet& kernel_set);

// Of a forward that wgmma leaves to the tiles that mma_sync has for decoding.
bool is_decode(const Problem& p);

// Why the wgmma family does not serve the pass, whatever the GPU; null: it does. The words follow
// "but ".
const char* why_not_wgmma(const Problem& p, const Gradients* g);

// Whether 0 * NaN of a masked key may reach a row: some row does not see a key of a tile that it
// meets. See Flags, and NanRecompute of the wgmma forward. False where the limits of the band lie
// outside of every sequence, as those of one causal row do.
bool nan_may_leak(const Problem& p);

// A region of the workspace, in bytes; a size of 0: the plan does not use it.
struct Region {
  int64_t offset = 0;
  int64_t bytes = 0;

  template <class T>
  T* in(void* workspace) const {
    return bytes == 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
};

struct ForwardWorkspace {
  Region report;          // of the index check
  Region fit;             // common::FitTask
  Region table;           // TileOrder::table
  Region tile_counter;    // wgmma: TmaForwardParams::tile_counter
  Region recompute_list;  // wgmma: TmaForwardParams::recompute_list
  Region flags;
  Region arrivals;  // ForwardParams::arrivals
  Region partial_out;
  Region partial_lse;
  int64_t bytes = 0;
};
ForwardWorkspace forward_workspace(const Problem& p, const Plan& plan);

// Whether the main kernel of a forward leaves partial results to a combine kernel.
bool needs_combine_kernel(const Plan& plan);

// Upper bound of the packed rows of a tile.
int64_t packed_rows(const Problem& p, const Plan& plan);

struct BackwardWorkspace {
  Region report;
  Region fit;
  Region table;
  Region key_flags;
  Region row_flags;
  Region row_lse;
  Region row_delta;
  Region row_origin;
  Region row_origin_low;
  Region far_rows;
  Region dq_sum;
  Region dq_semaphores;
  Region descriptors;  // wgmma: BackwardParams::descriptors
  Region tile_counter;
  Region dscale_partials;
  Region dsinks_partials;
  int64_t bytes = 0;
};
BackwardWorkspace backward_workspace(const Problem& p, const Gradients& g, const Plan& plan);

// Blocks of the kernels that take a tile of padded rows each.
int64_t row_blocks(const Problem& p, const Plan& plan);

}  // namespace tilewise::cuda
