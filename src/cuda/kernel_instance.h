// The entries of the lists of kernel instances. Every family lists its tile tables and instances in
// src/cuda/<family>/instances.h, where build, tests and planner read them. One instance is one .cu
// in the build tree, with all passes and forms that the family has.
#pragma once

namespace tilewise::cuda {

// A tile table, and the machine code of a build for all GPUs.
struct TileTable {
  const char* name;  // struct of arch/
  int number;        // KernelSet::architecture
  // As CMake names them, the oldest one first. An instance is compiled to PTX once, for its oldest
  // architecture, and assembled for each one: the front end costs as much as the assembler, and a
  // tile table needs nothing that its oldest GPU lacks. SASS of one major version does not run on
  // another one, and GPUs newer than these use PTX ("virtual").
  const char* architectures;
};

struct KernelInstance {
  const char* table;    // TileTable::name
  const char* element;  // struct of element.h
  int head_dim;         // compiled for; a problem takes the first one that is large enough
  int head_dim_v;
  const char* ptxas = "";  // option of ptxas
};

}  // namespace tilewise::cuda
