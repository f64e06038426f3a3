// The GPUs that the library knows (CUDA C++ Programming Guide, "Compute Capabilities"). A GPU that
// is not listed uses the row of the highest listed capability below its own, or Limits{} if there
// is none (sm_60 to sm_72, where only the simt family runs).
#pragma once

#include <array>
#include <cstdint>

#include "cuda/arch/tiles.h"

namespace tilewise::cuda::arch {

inline constexpr int kKilobyte = 1024;

// The largest cluster, in CTAs, that every GPU with clusters runs.
inline constexpr int64_t kPortableClusterSize = 8;

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

// Code for one compute capability and no later one ("sm_90a") has tables of its own, whose number
// is ten times the capability, plus one.
constexpr bool is_architecture_specific(int table) { return table > 10 * kLimits.front().sm; }

constexpr Limits limits_of(int sm) {
  Limits found{};
  for (const Limits& row : kLimits) {
    if (row.sm <= sm) found = row;
  }
  return found;
}

// The tile table of a GPU: the forced one, or its own if `forced` is 0.
constexpr int table_of(int sm, int forced) { return forced != 0 ? forced : limits_of(sm).table; }

}  // namespace tilewise::cuda::arch
