// The list of kernel families: the support matrix. The planner, the C ABI, the Python package, the
// documentation and the tests take the families from here; a new one is a folder and a line in
// families.cpp.
#pragma once

#include <span>

#include "cpu/family.h"
#include "cuda/family.h"

namespace tilewise::dispatch {

// On each device, slower families come first.
struct Families {
  std::span<const cpu::FamilyRow> cpu;
  std::span<const cuda::FamilyRow* const> cuda;

  const cpu::FamilyRow& of(cpu::Isa isa) const { return cpu[static_cast<std::size_t>(isa)]; }
};

// The families of this library.
const Families& families();

}  // namespace tilewise::dispatch
