// Which kernel serves a problem on a described device, how it is cut, and why.
#pragma once

#include <string>

#include "attention/problem.h"
#include "dispatch/device.h"
#include "dispatch/manifest.h"

namespace tilewise::dispatch {

struct Decision {
  tilewise_status status = TILEWISE_OK;
  const Family* family = nullptr;  // null when refused
  cpu::Plan cpu{};                 // how a CPU family cuts the problem
  std::string kernel;              // "cpu.avx512_bf16.forward.bf16"
  std::string why;                 // one line; when refused: what is missing
};

// A pure function of its arguments: the problem has been validated, nothing is dereferenced and
// nothing about the machine is asked. `gradients` is null for the forward.
Decision plan(const Problem& problem, const Gradients* gradients, const Device& device);

// Short names as they appear in kernel names: "f32", "f16", "bf16", "f8".
const char* short_dtype(int32_t dtype);

// Whether a family of the manifest can run on a device.
bool can_run(const Family& family, const Device& device);

}  // namespace tilewise::dispatch
