// What the launches of both passes share.
#pragma once

#include "cuda/backend.h"
#include "cuda/common/prepare.h"

namespace tilewise::cuda {

// Reads the index arrays on the GPU and waits for the answer; a fault is thrown as InvalidEntry.
// `report` lies in the workspace; `g` is null for the forward.
void check_entries(const Problem& p, const Gradients* g, void* report);

// Launches the preparation, when there is anything to prepare.
void prepare(common::PrepareParams& params, Stream stream);

}  // namespace tilewise::cuda
