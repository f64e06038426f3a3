// The GPUs that the library knows (CUDA C++ Programming Guide, "Compute Capabilities"). A GPU that
// is not listed uses the row of the highest listed capability below its own, or Limits{} if there
// is none (sm_60 to sm_72, where only the simt family runs).
#pragma once

#include <array>

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

inline constexpr int kKilobyte = 1024;

inline constexpr std::array kLimits = {
    Limits{.sm = 75, .table = 75, .shared_bytes = 64 * kKilobyte, .name = "Turing"},
    Limits{.sm = 80, .table = 80, .shared_bytes = 163 * kKilobyte, .name = "Ampere"},
    Limits{.sm = 86, .table = 86, .shared_bytes = 99 * kKilobyte, .name = "Ampere, GeForce"},
    Limits{.sm = 89, .table = 86, .shared_bytes = 99 * kKilobyte, .name = "Ada"},
    Limits{.sm = 90, .table = 90, .shared_bytes = 227 * kKilobyte, .name = "Hopper"},
    Limits{.sm = 100, .table = 90, .shared_bytes = 227 * kKilobyte, .name = "Blackwell"},
    Limits{.sm = 103, .table = 90, .shared_bytes = 227 * kKilobyte, .name = "Blackwell Ultra"},
    Limits{.sm = 110, .table = 90, .shared_bytes = 227 * kKilobyte, .name = "Thor"},
    Limits{.sm = 120, .table = 120, .shared_bytes = 99 * kKilobyte, .name = "Blackwell, GeForce"},
    Limits{.sm = 121, .table = 120, .shared_bytes = 99 * kKilobyte, .name = "Blackwell, DGX Spark"},
};

constexpr Limits limits_of(int sm) {
  Limits found{};
  for (const Limits& row : kLimits) {
    if (row.sm <= sm) found = row;
  }
  return found;
}

}  // namespace tilewise::cuda::arch
