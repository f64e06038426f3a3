// The rows of the CPU families: one set of kernels, compiled once per instruction set.
#pragma once

#include <optional>
#include <span>

#include "attention/family.h"
#include "cpu/backend.h"

namespace tilewise::cpu {

class IsaSet {
 public:
  constexpr IsaSet() = default;
  constexpr IsaSet with(Isa isa) const { return IsaSet(bits_ | bit(isa)); }
  constexpr bool contains(Isa isa) const { return (bits_ & bit(isa)) != 0; }

 private:
  explicit constexpr IsaSet(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t bit(Isa isa) { return 1u << static_cast<uint32_t>(isa); }
  uint32_t bits_ = 0;
};

// A CPU as the planner knows it.
struct Machine {
  Architecture architecture = kArchitecture;
  IsaSet compiled;             // instruction sets that this build has code for
  IsaSet runnable;             // instruction sets that the machine executes
  std::optional<Isa> forced;   // the only one to use
  bool slow_bf16_dot = false;  // the bf16 dot product is slower than converting to fp32
  int32_t threads = 1;         // tasks that may run at a time
};

// The machine that this process runs on; nothing is forced.
Machine this_machine();

// Both compiled and runnable.
bool usable(const Machine& machine, Isa isa);

// Usable, and not known to be slower than the instruction set before it.
bool worth_using(const Machine& machine, Isa isa);

// The forced instruction set, or the best one worth using.
Isa instruction_set(const Machine& machine);

struct FamilyRow {
  FamilyFacts facts;
  Isa isa;
  DtypeSet gains;  // dtypes for which it is faster than the row before it of its architecture

  // Why the family does not serve a request that it computes.
  WhyNot (*why_not)(const Request& request, const Machine& machine);

  // A pure function of its arguments, which dereferences no pointer of the problem.
  Plan (*plan)(const Request& request, const Machine& machine);

  // The request has been validated, and the workspace has at least plan.workspace_bytes, 64-byte
  // aligned. Every requested output is written in full.
  void (*launch)(const Request& request, const Plan& plan, void* workspace,
                 const Parallel& parallel);
};

// In the order of the instruction sets, slowest first.
std::span<const FamilyRow> families();

}  // namespace tilewise::cpu
