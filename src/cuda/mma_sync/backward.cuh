// The backward of the mma_sync family: backward_prepare, backward, backward_finish, each over one
// BackwardParams. Prepare and finish have a block per tile of rows and query head.
#pragma once

#include "cuda/mma_sync/backward_finish.cuh"
#include "cuda/mma_sync/backward_main.cuh"
#include "cuda/mma_sync/backward_prepare.cuh"
