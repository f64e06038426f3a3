// The CPU backend: one set of loops, compiled per instruction set, chosen at run time.
#pragma once

#include <array>

#include "attention/problem.h"
#include "attention/schedule.h"
#include "base/parallel.h"

namespace tilewise::cpu {

// Worst first. The numbers index `kIsaNames` and the tables built from it.
enum class Isa : int32_t { portable, avx2, avx512, avx512_bf16, amx };
inline constexpr std::array<const char*, 5> kIsaNames = {"portable", "avx2", "avx512",
                                                         "avx512_bf16", "amx"};

// Whether this build has code for it, and whether this machine (CPUID, and XGETBV for the operating
// system's share) runs it. AMX asks Linux for permission once.
bool compiled(Isa isa);
bool available(Isa isa);
Isa best_available();

// The core of this machine, as far as its instruction sets do not say what suits it: AMD's before
// Zen 5, Zen 5 and later, all others. Results do not depend on it.
enum class Core : int32_t { zen, zen5, usual };
Core core();

// How a launch is cut. A pure function of its arguments: nothing here looks at the machine, and
// nothing but `threads` (scratch) and `isa` (tile shapes) enters besides the problem.
struct Plan {
  Isa isa;
  int32_t threads;
  int32_t tile_q;  // packed query rows of a work item
  int32_t tile_k;  // keys of a tile
  int64_t splits;  // forward: key splits; backward: key chunks of the longest possible sequence
  SplitRule rule;  // forward: how many of the splits a sequence has
  int64_t heads;   // forward: key/value heads of a work item
  int64_t workspace_bytes;
  const char* engine;  // "fma", "dot", "amx", "amx_split", "stream" (decoding)
};

Plan plan_forward(const Problem& problem, Isa isa, int32_t threads);
Plan plan_backward(const Problem& problem, const Gradients& gradients, Isa isa, int32_t threads);

// The problem has been validated and the workspace is at least plan.workspace_bytes, 64-byte
// aligned. Everything the caller asked for is written in full.
void forward(const Problem& problem, const Plan& plan, void* workspace, const Parallel& parallel);
void backward(const Problem& problem, const Gradients& gradients, const Plan& plan, void* workspace,
              const Parallel& parallel);

}  // namespace tilewise::cpu
