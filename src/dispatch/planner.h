// The planner: the kernel that serves a problem on a described device, its plan, and the reason.
#pragma once

#include <string>

#include "attention/request.h"
#include "dispatch/device.h"
#include "dispatch/manifest.h"

namespace tilewise::dispatch {

struct Decision {
  tilewise_status status = TILEWISE_UNSUPPORTED;
  const Family* family = nullptr;  // null if no family serves the problem
  cpu::Plan cpu{};                 // the plan of a CPU family
  cuda::Plan cuda{};               // the plan of a CUDA family

  bool on_gpu() const { return family != nullptr && family->device == TILEWISE_CUDA; }
  int64_t workspace_bytes() const { return on_gpu() ? cuda.workspace_bytes : cpu.workspace_bytes; }
};

// A pure function of its arguments: the problem has been validated; nothing is dereferenced,
// allocated or queried from the machine.
Decision plan(const Request& request, const Device& device);

// "cpu.avx512_bf16.forward.bf16"; empty if no family serves the problem.
std::string kernel_name(const Decision& decision, const Request& request);

// One line: why this family, and not the faster one; or what is missing if no family serves the
// problem.
std::string explain(const Decision& decision, const Request& request, const Device& device);

// Short names as they appear in kernel names: "f32", "f16", "bf16", "f8".
const char* short_dtype(int32_t dtype);

// Whether the device can run any kernel of the family.
bool can_run(const Family& family, const Device& device);

// planner_cuda.cpp: the same questions for a CUDA device.
Decision plan_cuda(const Request& request, const Device& device);
std::string explain_cuda(const Decision& decision, const Request& request, const Device& device);
std::string refuse_cuda(const Request& request, const Device& device);

// Shared by both halves of the planner.
bool serves(const Family& family, const Request& request);
std::string request_text(const Request& request);

}  // namespace tilewise::dispatch
