// The CPU backend: one set of kernels, compiled once per instruction set and selected at run time.
#pragma once

#include <array>

#include "attention/request.h"
#include "attention/schedule.h"
#include "base/parallel.h"

namespace tilewise::cpu {

// Slowest first. The numbers index `kIsaNames` and the tables built from it.
enum class Isa : int32_t { portable, neon, neon_bf16, avx2, avx512, avx512_bf16, amx };
inline constexpr std::array<const char*, 7> kIsaNames = {
    "portable", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx"};

// The architectures with instruction sets of their own.
enum class Architecture : int32_t { aarch64, x86_64, other };
#if defined(__aarch64__)
inline constexpr Architecture kArchitecture = Architecture::aarch64;
#elif defined(__x86_64__)
inline constexpr Architecture kArchitecture = Architecture::x86_64;
#else
inline constexpr Architecture kArchitecture = Architecture::other;
#endif

constexpr bool exists_on(Isa isa, Architecture architecture) {
  if (isa == Isa::portable) return true;
  const bool arm = isa == Isa::neon || isa == Isa::neon_bf16;
  return architecture == (arm ? Architecture::aarch64 : Architecture::x86_64);
}

// Whether this build has code for an instruction set, and whether this machine can run it (on
// x86-64 CPUID, and XGETBV for the register state that the operating system saves; on Arm what
// Linux reports). AMX also asks Linux for permission, once.
bool compiled(Isa isa);
bool available(Isa isa);
Isa best_available();

// The kind of core, where instruction sets alone do not determine the best prefetch scheme: AMD
// before Zen 5, Zen 5 and later, and all others. Results do not depend on it.
enum class Core : int32_t { zen, zen5, usual };
Core core();

// How a launch is divided into work items. A pure function of the request, of `threads` (scratch
// memory and the size of work items) and of `isa` (tile shapes); it does not query the machine.
struct Plan {
  Isa isa;
  int32_t threads;
  int32_t tile_q;  // packed query rows per work item
  int32_t tile_k;  // keys per tile
  int64_t splits;  // forward: splits; backward: key chunks; of the longest possible sequence
  SplitRule rule;  // forward: how many of the splits each sequence uses
  int64_t heads;   // forward: key/value heads per work item
  int64_t workspace_bytes;
  const char* engine;  // "fma", "dot", "amx", "amx_split", "stream" (decoding)
};

Plan plan(const Request& request, Isa isa, int32_t threads);

// The request has been validated, and the workspace has at least plan.workspace_bytes, 64-byte
// aligned. Every requested output is written in full.
void launch(const Request& request, const Plan& plan, void* workspace, const Parallel& parallel);

}  // namespace tilewise::cpu
