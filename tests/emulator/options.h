// Environment variables, read at every launch.
#pragma once

#include <cstdint>

namespace tilewise::cuda::emulator {

// Which dependent launches start before their predecessor: none; those whose predecessor is an
// ordinary launch; or those whose predecessor is itself a dependent launch.
enum class Pdl { none, first, second };
enum class Order { forward, reverse, shuffled, warps };

struct Options {
  bool early_copies = false;     // TILEWISE_EMULATOR_COPIES=early|late
  Pdl pdl = Pdl::none;           // TILEWISE_EMULATOR_PDL=none|first|second
  Order order = Order::forward;  // TILEWISE_EMULATOR_ORDER=forward|reverse|shuffled|warps
  uint64_t seed = 1;             // TILEWISE_EMULATOR_SEED, for shuffled orders
  bool strict = false;           // TILEWISE_EMULATOR_STRICT=0|1
  bool check_races = true;       // TILEWISE_EMULATOR_RACES=0|1
  bool truncate_sums = false;    // TILEWISE_EMULATOR_SUMS=rounded|truncated, of tf32 and float8
  bool count_banks = false;      // TILEWISE_EMULATOR_BANKS=0|1
  bool report = false;           // TILEWISE_EMULATOR_REPORT=1: statistics of every launch to stderr
};

// Throws Fault for an unknown value.
Options read_options();

}  // namespace tilewise::cuda::emulator
