// Barriers of shared memory, and the position of a role in a pipeline of stages.
#pragma once

#include "cuda/ptx/mbarrier.h"

namespace tilewise::cuda::common {

// An mbarrier, named for what is true when its phase completes.
struct Barrier {
  ptx::SharedAddress address;

  TILEWISE_DEVICE void init(int arrivals) const { ptx::mbarrier_init(address, arrivals); }
  TILEWISE_DEVICE void arrive() const { ptx::mbarrier_arrive(address); }
  // Arrives; the phase completes when this many bytes have also landed.
  TILEWISE_DEVICE void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(address, bytes); }
  TILEWISE_DEVICE void wait(int parity) const { ptx::mbarrier_wait_parity(address, parity); }
};

// Position in a pipeline as stage and phase: the address of a stage, for which the next product
// waits, needs no division or remainder.
template <int kStages>
struct PipelineState {
  int index = 0;
  int parity = 0;

  TILEWISE_DEVICE int stage() const { return index; }
  TILEWISE_DEVICE int phase() const { return parity; }
  TILEWISE_DEVICE void next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tilewise::cuda::common
