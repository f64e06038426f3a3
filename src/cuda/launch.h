// What the launches of both passes share.
#pragma once

#include "cuda/backend.h"
#include "cuda/common/prepare.h"
#include "cuda/kernel_set.h"

namespace tilewise::cuda {

// Reads the index arrays on the GPU and waits for the answer; a fault is thrown as InvalidArgument.
// `report` lies in the workspace; `g` is null for the forward.
void check_entries(const Problem& p, const Gradients* g, void* report);

// None twice in a process, and such that memory of unknown contents does not hold it.
uint64_t next_launch_id();

// Launches the preparation, when there is anything to prepare; whether there was.
bool prepare(common::PrepareParams& params, Stream stream);

// TMA maps of q or dout, of k or v (paged ones have none), and of k or v in pages, of which boxes
// have as many rows as divide a page, or are one.
TensorMap map_of_rows(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_keys(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_pages(const Problem& p, const tilewise_tensor& view, int64_t columns,
                       int32_t box_rows);

// Blocks of a second pass over flagged tiles: as many as the GPU runs at once. The tiles of a head
// are often a power of two apart, so an odd number spreads them over the blocks.
int64_t recompute_blocks(const Flags& flags, const Tile& tile, int32_t device_index);

}  // namespace tilewise::cuda
