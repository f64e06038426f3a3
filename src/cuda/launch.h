// Helpers of the forward and backward launches.
#pragma once

#include "cuda/backend.h"
#include "cuda/common/prepare.h"
#include "cuda/kernel_set.h"

namespace tilewise::cuda {

// Checks the index arrays on the GPU and waits for the result; throws InvalidArgument for a fault.
// `report` is an IndexFault in the workspace.
void check_entries(const Request& request, void* report);

void launch_forward(const Problem& p, const Plan& plan, void* workspace);
void launch_backward(const Request& request, const Plan& plan, void* workspace);

// Returns an id that is unique within the process. Ids count up from a random number, so that
// uninitialised memory is unlikely to hold one.
uint64_t next_launch_id();

// Launches the prepare kernel if there is anything to prepare, and returns whether there was.
bool prepare(common::PrepareParams& params, Stream stream);

// Tensor maps of q or dout, of contiguous k or v (an empty map if they are paged), and of k or v in
// pages, whose size `box_rows` divides.
TensorMap map_of_rows(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_keys(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_pages(const Problem& p, const tilewise_tensor& view, int64_t columns,
                       int32_t box_rows);

// Number of CTAs for the NaN recompute of flagged tiles: one wave. The number is odd, because
// flagged tiles are often a power of two apart, and with an even number few CTAs would get all of
// them.
int64_t recompute_blocks(const Flags& flags, const Tile& tile, int32_t device_index);

}  // namespace tilewise::cuda
