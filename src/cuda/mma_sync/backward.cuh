// The backward of the mma_sync family: backward_prepare, backward and backward_finish, which share
// one BackwardParams. Prepare and finish have one CTA per row tile and query head.
#pragma once

#include "cuda/mma_sync/backward_finish.cuh"
#include "cuda/mma_sync/backward_main.cuh"
#include "cuda/mma_sync/backward_prepare.cuh"
