// The planner: the kernel that serves a problem on a described device, its plan, and the reason.
#pragma once

#include <string>

#include "attention/request.h"
#include "dispatch/device.h"
#include "dispatch/families.h"

namespace tilewise::dispatch {

struct Decision {
  tilewise_status status = TILEWISE_UNSUPPORTED;
  const FamilyFacts* family = nullptr;        // null if no family serves the request
  const cpu::FamilyRow* cpu_row = nullptr;    // its row if it is a CPU family
  const cuda::FamilyRow* cuda_row = nullptr;  // its row if it is a CUDA family
  cpu::Plan cpu{};                            // the plan of a CPU family
  cuda::Plan cuda{};                          // the plan of a CUDA family
  bool widens_q = false;                      // float8 queries: the family reads a 16-bit copy
  int64_t q_bytes = 0;                        // at the start of the workspace, for that copy

  bool on_gpu() const { return cuda_row != nullptr; }
  int64_t workspace_bytes() const {
    return q_bytes + (on_gpu() ? cuda.workspace_bytes : cpu.workspace_bytes);
  }
};

// A pure function of its arguments: the problem has been validated; nothing is dereferenced,
// allocated or queried from the machine.
Decision plan(const Request& request, const Device& device);

// "cpu.avx512_bf16.forward.bf16"; empty if no family serves the problem.
std::string kernel_name(const Decision& decision, const Request& request);

// One line: why this family, and not the faster one; or what is missing if no family serves the
// problem.
std::string explain(const Decision& decision, const Request& request, const Device& device);

// Runs a plan that serves the request. The workspace has at least decision.workspace_bytes(), in
// memory of the device.
void launch(const Decision& decision, const Request& request, void* workspace,
            const Parallel& parallel);

// Whether the device can run any kernel of the family.
bool can_run(const cpu::FamilyRow& family, const Device& device);
bool can_run(const cuda::FamilyRow& family, const Device& device);

// planner_cuda.cpp: the same questions for a CUDA device.
Decision plan_cuda(const Request& request, const Device& device);
// `asked` is the request of the caller, of which the family serves `request`.
std::string explain_cuda(const Decision& decision, const Request& request, const Request& asked,
                         const Device& device);
std::string refuse_cuda(const Request& request, const Device& device);

// Shared by both halves of the planner.
std::string request_text(const Request& request);

}  // namespace tilewise::dispatch
