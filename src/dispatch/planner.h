// Which kernel serves a problem on a described device, how it is cut, and why.
#pragma once

#include <string>

#include "attention/problem.h"
#include "dispatch/device.h"
#include "dispatch/manifest.h"

namespace tilewise::dispatch {

struct Decision {
  tilewise_status status = TILEWISE_UNSUPPORTED;
  const Family* family = nullptr;  // null when no family serves the problem
  cpu::Plan cpu{};                 // how a CPU family cuts the problem
  cuda::Plan cuda{};               // how a CUDA family does

  bool on_gpu() const { return family != nullptr && family->device == TILEWISE_CUDA; }
  int64_t workspace_bytes() const { return on_gpu() ? cuda.workspace_bytes : cpu.workspace_bytes; }
};

// A pure function of its arguments: the problem has been validated, nothing is dereferenced,
// nothing is allocated and nothing about the machine is asked. `gradients` is null for the forward.
Decision plan(const Problem& problem, const Gradients* gradients, const Device& device);

// "cpu.avx512_bf16.forward.bf16"; empty when no family serves the problem.
std::string kernel_name(const Decision& decision, const Problem& problem,
                        const Gradients* gradients);

// One line: why this family and not the faster one; when none serves the problem, what is missing.
std::string explain(const Decision& decision, const Problem& problem, const Gradients* gradients,
                    const Device& device);

// Short names as they appear in kernel names: "f32", "f16", "bf16", "f8".
const char* short_dtype(int32_t dtype);

// Whether a family of the manifest can run on a device: something of it, for some problem.
bool can_run(const Family& family, const Device& device);

// planner_cuda.cpp: the same questions for a CUDA device.
Decision plan_cuda(const Problem& problem, const Gradients* gradients, const Device& device);
std::string explain_cuda(const Decision& decision, const Problem& problem,
                         const Gradients* gradients, const Device& device);
std::string refuse_cuda(const Problem& problem, const Gradients* gradients, const Device& device);

// What both halves of the planner say of a request.
bool serves(const Family& family, const Problem& problem, const Gradients* gradients);
std::string request_text(const Problem& problem, const Gradients* gradients);

}  // namespace tilewise::dispatch
