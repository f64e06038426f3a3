// What the planner knows about a machine. It is a plain description: tests plan for machines they
// do not have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cpu/backend.h"
#include "cuda/tables.h"
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
  IsaSet compiled;                 // this build has code for it
  IsaSet runnable;                 // this machine executes it
  std::optional<cpu::Isa> forced;  // TILEWISE_CPU or tilewise_select_cpu
  bool slow_bf16_dot = false;      // the bf16 dot product loses against converting to fp32
  int32_t threads = 1;             // tasks that may run at once

  // CUDA
  cuda::Gpu gpu;                            // `table` is what TILEWISE_FORCE_ARCH asks for
  const cuda::Inventory* inside = nullptr;  // null: what this build holds
};

// The units and the machine code that a CUDA device is planned with.
const cuda::Inventory& inside(const Device& device);

// The tile table that a CUDA device is planned with; 0: none is for it.
int32_t tile_table(const Device& device);

// "SASS of sm_75, sm_90 and PTX of sm_75"
std::string code_text(const cuda::Inventory& inside);

// Both compiled and runnable.
bool usable(const Device& device, cpu::Isa isa);

// Usable, and not known to be slower than the one before it.
bool worth_using(const Device& device, cpu::Isa isa);

// The forced instruction set, or the best one worth using.
cpu::Isa instruction_set(const Device& device);

// This machine's CPU with the selection of this process.
Device this_cpu(int32_t threads);

// GPU `index` of this machine with TILEWISE_FORCE_ARCH. Throws cuda::Error when there is none.
Device this_gpu(int32_t index);

// Why TILEWISE_FORCE_ARCH cannot be honoured on this device; empty when it can or is not set.
std::string forced_table_problem(const Device& device);

// Forces an instruction set for the process, or the best again when `name` is null. Returns a
// sentence that says why not, empty when it is done.
std::string select_isa(const char* name);

// Why TILEWISE_NUM_THREADS or TILEWISE_CPU cannot be honoured; empty when they can, are not set, or
// the latter was overruled by select_isa.
std::string environment_problem();

}  // namespace tilewise::dispatch
