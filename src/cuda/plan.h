// The planner of the CUDA backend. It takes a registry, so that tests can plan for builds and GPUs
// that they do not have. Everything here is a pure function of its arguments and reads no index
// array.
#pragma once

#include "cuda/backend.h"
#include "cuda/kernel_set.h"
#include "cuda/params.h"

namespace tilewise::cuda {

// The kernels that serve a request; null: none do. The tile table is the GPU's own or the
// forced one. If the build lacks the GPU's own, it is the nearest lower one whose code the GPU runs
// and whose tiles fit its shared memory.
const KernelSet* find_kernels(const Request& request, Family family, const Gpu& gpu,
                              const Registry& registry);

Plan plan_forward(const Problem& p, Family family, const Gpu& gpu, const Registry& registry);
Plan plan_backward(const Request& request, Family family, const Gpu& gpu, const Registry& registry);

// Whether the fast path serves the request: it has no option of the general form, and every row
// that is read or written starts at a multiple of 16 bytes.
bool fits_plain(const Request& request);

// The kernel form for a forward.
Form forward_form(const Problem& p, const KernelSet& kernel_set);

// Whether a forward has so few rows that it uses the decode tiles of mma_sync instead of wgmma.
bool is_decode(const Problem& p);

// Why the wgmma family does not serve the request on any GPU; null: it does. The text continues a
// sentence after "but ".
const char* why_not_wgmma(const Request& request);

// Whether 0 * NaN of a masked key may contaminate a row, because some key tile has keys that only
// some rows attend to. See Flags and, for the wgmma forward, NanRecompute. False when the limits of
// the band lie outside of every sequence, as with a single causal row.
bool nan_may_leak(const Problem& p);

// A region of the workspace, in bytes. Its size is 0 if the plan does not use it.
struct Region {
  int64_t offset = 0;
  int64_t bytes = 0;

  template <class T>
  T* in(void* workspace) const {
    return bytes == 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
};

struct ForwardWorkspace {
  Region report;          // result of the index check
  Region index_copies;    // common::IndexCopies
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

// Whether a combine kernel merges the partial results of the forward's main kernel.
bool needs_combine_kernel(const Plan& plan);

// Upper bound of the packed rows per sequence and head group.
int64_t packed_rows(const Problem& p, const Plan& plan);

struct BackwardWorkspace {
  Region report;
  Region index_copies;
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
  Region descriptors;  // wgmma: TileDescriptor per CTA
  Region tile_counter;
  Region dscale_partials;
  Region dsinks_partials;
  int64_t bytes = 0;
};
BackwardWorkspace backward_workspace(const Problem& p, const Gradients& g, const Plan& plan);

// CTAs of the row kernels, which take one tile of padded rows each.
int64_t row_blocks(const Problem& p, const Plan& plan);

}  // namespace tilewise::cuda
