// The row of a CUDA family: how the planner and the launcher use its kernels. src/cuda/<family>/
// family.cpp has the row, and nothing outside that folder and the list of src/dispatch names it.
#pragma once

#include "attention/family.h"
#include "cuda/backend.h"

namespace tilewise::cuda {

// Compute capabilities as major * 10 + minor, both ends included.
struct SmRange {
  static constexpr int32_t kAnyLater = 999;
  int32_t first = 0;
  int32_t last = kAnyLater;

  constexpr bool contains(int32_t sm) const { return first <= sm && sm <= last; }
};

// The GPU and the build that a plan is for. In tests, neither has to be the one that they run on.
struct Target {
  const Gpu& gpu;
  const Registry& registry;
  const FamilyRow* recomputes = nullptr;  // the family with `recompute_kernels`
};

struct FamilyRow {
  FamilyFacts facts;

  // GPUs with its instructions. If `last` is given, the family is for one generation of GPUs:
  // explain() does not mention it on other GPUs, nor for dtypes that it does not compute.
  SmRange sm;

  // The tile table (arch/) of a GPU; 0 for a family without tables.
  int32_t (*table)(const Gpu& gpu);

  // Why it does not serve a request that it computes, on a GPU that has its instructions.
  WhyNot (*why_not)(const Request& request, const Gpu& gpu);

  // A pure function of its arguments, which reads no index array. The plan has no kernel set if
  // the registry has none that serves the request.
  Plan (*plan)(const Request& request, const Target& target);

  // Runs on problem.stream of GPU problem.device_index. The request has been validated; the
  // workspace is GPU memory of at least plan.workspace_bytes, aligned to 64 bytes.
  void (*launch)(const Request& request, const Plan& plan, void* workspace);

  // The kernels that recompute tiles which kernels of other families have flagged (Flags in
  // params.h); returns null if the registry has none. Only one family has this function.
  const KernelSet* (*recompute_kernels)(const Request& request, const Target& target) = nullptr;

  // False: its results have been compared with exact ones on the emulator alone, and on no GPU. The
  // planner takes it only where Gpu::takes_unproved, or where a Gpu::proofs covers the tile.
  bool proved = true;

  bool serves_on(const Gpu& gpu) const {
    return proved || gpu.takes_unproved || gpu.proof_of(facts.name) != nullptr;
  }
  bool serves_tile_on(int32_t head_dim, const Gpu& gpu) const {
    if (proved || gpu.takes_unproved) return true;
    const Proof* proof = gpu.proof_of(facts.name);
    return proof != nullptr && proof->covers(head_dim);
  }
  constexpr bool is_of_one_generation() const { return sm.last != SmRange::kAnyLater; }
};

}  // namespace tilewise::cuda
