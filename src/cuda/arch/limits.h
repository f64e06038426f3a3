// The GPUs the library knows (CUDA C++ Programming Guide, "Compute Capabilities"). A GPU that is
// not listed uses the row of the highest capability below its own.
#pragma once

#include <array>

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

inline constexpr int kKilobyte = 1024;

inline constexpr std::array kLimits = {
    Limits{75, 75, 64 * kKilobyte, "Turing"},
    Limits{80, 80, 163 * kKilobyte, "Ampere"},
    Limits{86, 86, 99 * kKilobyte, "Ampere, GeForce"},
    Limits{89, 86, 99 * kKilobyte, "Ada"},
    Limits{90, 90, 227 * kKilobyte, "Hopper"},
    Limits{100, 90, 227 * kKilobyte, "Blackwell"},
    Limits{103, 90, 227 * kKilobyte, "Blackwell Ultra"},
    Limits{110, 90, 227 * kKilobyte, "Thor"},
    Limits{120, 120, 99 * kKilobyte, "Blackwell, GeForce"},
    Limits{121, 120, 99 * kKilobyte, "Blackwell, DGX Spark"},
};

constexpr Limits limits_of(int sm) {
  Limits found{};
  for (const Limits& row : kLimits) {
    if (row.sm <= sm) found = row;
  }
  return found;
}

}  // namespace tilewise::cuda::arch
