// What the planner knows about a machine: a plain description, so tests can plan for machines that
// are not present.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cpu/backend.h"
#include "cuda/kernel_set.h"
#include "tilewise/tilewise.h"

namespace tilewise::dispatch {

class IsaSet {
 public:
  constexpr IsaSet() = default;
  constexpr IsaSet with(cpu::Isa isa) const { return IsaSet(bits_ | bit(isa)); }
  constexpr bool contains(cpu::Isa isa) const { return (bits_ & bit(isa)) != 0; }

 private:
  explicit constexpr IsaSet(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t bit(cpu::Isa isa) { return 1u << static_cast<uint32_t>(isa); }
  uint32_t bits_ = 0;
};

struct Device {
  tilewise_device kind = TILEWISE_CPU;

  // CPU
  IsaSet compiled;                 // instruction sets that this build has code for
  IsaSet runnable;                 // instruction sets that this machine executes
  std::optional<cpu::Isa> forced;  // by TILEWISE_CPU or tilewise_select_cpu
  bool slow_bf16_dot = false;      // the bf16 dot product is slower than converting to fp32
  int32_t threads = 1;             // tasks that may run at a time

  // CUDA
  cuda::Gpu gpu;                             // `table` is the one that TILEWISE_FORCE_ARCH requests
  const cuda::Registry* registry = nullptr;  // null: the kernels of this build
};

// The kernels and the machine code that the planner assumes for a CUDA device.
const cuda::Registry& registry_of(const Device& device);

// The tile table that the planner uses for a CUDA device; 0: no table fits it.
int32_t tile_table(const Device& device);

// "SASS of sm_75, sm_90 and PTX of sm_75"
std::string code_text(const cuda::Registry& registry);

// Both compiled and runnable.
bool usable(const Device& device, cpu::Isa isa);

// Usable, and not known to be slower than the instruction set before it.
bool worth_using(const Device& device, cpu::Isa isa);

// The forced instruction set, or the best one worth using.
cpu::Isa instruction_set(const Device& device);

// This machine's CPU with the selection of this process.
Device this_cpu(int32_t threads);

// GPU `index` of this machine with TILEWISE_FORCE_ARCH. Throws cuda::Error when there is none.
Device this_gpu(int32_t index);

// Why TILEWISE_FORCE_ARCH cannot be honoured on this device; empty when it can or is not set.
std::string forced_table_problem(const Device& device);

// Forces an instruction set for the process, or returns to the best one if `name` is null. Returns
// a sentence that says why it cannot, empty on success.
std::string select_isa(const char* name);

// Why TILEWISE_NUM_THREADS or TILEWISE_CPU cannot be honoured; empty if they can, are not set, or
// if select_isa has overruled the latter.
std::string environment_problem();

}  // namespace tilewise::dispatch
