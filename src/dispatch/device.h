// What the planner knows about a machine: a plain description, so tests can plan for machines that
// are not present.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/kernel_set.h"
#include "dispatch/families.h"
#include "tilewise/tilewise.h"

namespace tilewise::dispatch {

struct Device {
  tilewise_device kind = TILEWISE_CPU;
  cpu::Machine cpu;  // TILEWISE_CPU; an instruction set is forced by TILEWISE_CPU (environment) or
                     // tilewise_select_cpu
  cuda::Gpu gpu;     // TILEWISE_CUDA; `table` is the one that TILEWISE_FORCE_ARCH requests
  const cuda::Registry* registry = nullptr;  // null: the kernels of this build
  const Families* families = nullptr;        // null: the families of this library
};

const Families& families_of(const Device& device);

// The kernels and the machine code that the planner assumes for a CUDA device.
const cuda::Registry& registry_of(const Device& device);

// The tile table of a GPU, or the one that is forced; 0: no table fits it.
int32_t tile_table(const Device& device);

// "SASS of sm_75, sm_90 and PTX of sm_75"
std::string code_text(const cuda::Registry& registry);

// This machine's CPU with the selection of this process.
Device this_cpu(int32_t threads);

// GPU `index` of this machine with TILEWISE_FORCE_ARCH. Throws cuda::Error when there is none.
Device this_gpu(int32_t index);

// Why TILEWISE_FORCE_ARCH cannot be honoured on this device; empty when it can or is not set.
std::string forced_table_problem(const Device& device);

// Forces an instruction set for the process, or returns to the best one if `name` is null. Returns
// the reason if it cannot, empty on success.
std::string select_isa(const char* name);

// Why TILEWISE_NUM_THREADS or TILEWISE_CPU cannot be honoured; empty if they can, are not set, or
// if select_isa has overruled the latter.
std::string environment_problem();

}  // namespace tilewise::dispatch
