// The part of planning that the CUDA families share. Every function is pure: its result depends on
// its arguments alone. None reads an index array.
#pragma once

#include "cuda/family.h"
#include "cuda/kernel_set.h"
#include "cuda/params.h"

namespace tilewise::cuda {

// The kernel sets of a registry that may serve a request.
struct KernelQuery {
  const FamilyRow* family;
  int32_t table;  // tile table; 0 in a family without tables
  int32_t dtype;  // that the kernels are compiled for
  bool tf32 = false;
};

// The kernel set with the smallest head dimensions that hold the problem's, whose code the GPU runs
// and whose tiles fit its shared memory; null: there is none.
const KernelSet* find_kernels(const Request& request, const KernelQuery& query,
                              const Target& target);

// The kernels with smaller tiles for few rows if there are any that serve the request, otherwise
// the kernel set itself.
const KernelSet* with_few_rows(const KernelSet& kernel_set, const Request& request, const Gpu& gpu);

// Why a family whose kernels read no mask does not serve a request.
constexpr WhyNot why_no_mask(const Request& request) {
  if (request.problem.mask == nullptr) return {};
  return {.text = "it reads no mask"};
}

// Why a family that writes no max_logits does not serve a request.
inline WhyNot why_no_max_logits(const Request& request) {
  if (request.is(Pass::forward) && request.problem.max_logits != nullptr)
    return {.text = "it writes no max_logits"};
  return {};
}

// Why a family whose out always has the dtype of q does not serve a request.
inline WhyNot why_no_other_out(const Request& request) {
  if (request.dtypes.out != request.dtypes.q)
    return {.text = "it has no out in float32 beside q of 16 bits"};
  return {};
}

// The kernels that recompute flagged tiles (FamilyRow::recompute_kernels); null: there are none.
const KernelSet* find_recompute_kernels(const Request& request, const Target& target);

// Whether the fast path serves the request: it has no option of the general form, and every row
// that is read or written starts at a multiple of 16 bytes.
bool fits_plain(const Request& request);

// The kernel forms for a forward and a backward.
Form forward_form(const Problem& p, const KernelSet& kernel_set);
Form backward_form(const Request& request, const KernelSet& kernel_set);

// A forward is planned in four steps, between which a family adds what only its kernels do: tiles,
// packing and their order; the splits of the keys of a tile; the sizes of the grid; triggers of the
// next launch and the workspace. After the first and the third step the plan may have a grid that
// cannot be launched; the other steps are then skipped.
Plan plan_forward_tiles(const Problem& p, const KernelSet& kernel_set, const Gpu& gpu);
void plan_key_splits(Plan& plan, const Problem& p, const Gpu& gpu);
void plan_forward_grid(Plan& plan, const Problem& p, const Gpu& gpu);
void finish_forward_plan(Plan& plan, const Problem& p, const Gpu& gpu);

// A backward is planned in three steps: tiles and their order; interleaved heads; the largest of
// the grids, for kernels with one CTA per tile of keys or of rows. A family with other grids or
// another order plans these itself.
Plan plan_backward_tiles(const Request& request, const KernelSet& kernel_set);
void interleave_backward_heads(Plan& plan, const Problem& p, const Gpu& gpu);
void plan_backward_grid(Plan& plan, const Request& request);

// Number of heads whose Q, dO and dQ sums fit in L2 together.
int64_t heads_in_l2(const Problem& p, const Plan& plan, const Gpu& gpu);

// Whether 0 * NaN of a masked key may contaminate a row, because some key tile has keys that only
// some rows attend to (see Flags). False when the limits of the band lie outside of every sequence,
// as with a single causal row.
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
  Region tile_counter;    // TmaForwardParams::tile_counter
  Region recompute_list;  // TmaForwardParams::recompute_list
  Region values;          // TransposeParams::to
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

// The regions that all families use; each family derives a struct with those of its kernels.
struct BackwardWorkspace {
  Region report;
  Region index_copies;
  Region table;
  Region key_flags;
  Region row_flags;
  Region row_delta;
  Region dq_semaphores;  // the prepare kernel zeroes it
  Region dscale_partials;
  Region dsinks_partials;
  int64_t bytes = 0;
};
class Workspace;

// The regions of kernels that compute far rows (BackwardParams::far_rows).
struct FarRowRegions {
  Region flag;
  Region row_origin;
  Region row_origin_low;
};
// Takes them first: a tool that reports reads of uninitialized memory finds `flag` at the start of
// the workspace.
FarRowRegions take_far_rows(Workspace& workspace, int64_t rows);

// Takes the regions of the base class.
void take_shared_regions(BackwardWorkspace& regions, Workspace& workspace, const Request& request,
                         const Plan& plan);

// CTAs of the row kernels, which take one tile of padded rows each.
int64_t row_blocks(const Problem& p, const Plan& plan);

}  // namespace tilewise::cuda
