// What `tilewise doctor --prove` has found on GPUs about families whose row says that no GPU has
// proved them (FamilyRow::proved).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cuda/runtime.h"

namespace tilewise::dispatch {

// A proof holds for GPUs of one name and compute capability with one driver.
struct ProvedOn {
  std::string gpu_name;
  int32_t sm = 0;
  int32_t driver = 0;  // cuda::CudaVersions::driver
};

// Replaces what is known about the family on these GPUs; without head dimensions, withdraws it.
void set_proof(const ProvedOn& where, const cuda::Proof& proof);

// The proofs that hold on GPU `index` of this machine; they stay valid until the process ends.
std::span<const cuda::Proof> proofs_of(int32_t index);

}  // namespace tilewise::dispatch
