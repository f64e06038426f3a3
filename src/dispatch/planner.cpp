#include "dispatch/planner.h"

namespace tilewise::dispatch {
namespace {

const char* pass_name(const Gradients* gradients) {
  return gradients == nullptr ? "forward" : "backward";
}

bool serves(const Family& family, const Problem& p, const Gradients* gradients) {
  return family.dtypes.contains(p.dtype) && p.head_dim <= family.max_head_dim &&
         p.head_dim_v <= family.max_head_dim &&
         (gradients == nullptr ? family.forward : family.backward);
}

// The first CPU family above `chosen` that would be faster for this problem.
const Family* faster_than(const Family& chosen, const Problem& p, const Gradients* gradients,
                          const Device& device) {
  for (const Family* row = &chosen + 1; row != kManifest.data() + kManifest.size(); ++row) {
    if (row->device != chosen.device || !serves(*row, p, gradients)) continue;
    const bool known_slower = usable(device, row->isa) && !worth_using(device, row->isa);
    if (row->gains.contains(p.dtype) && !known_slower) return row;
  }
  return nullptr;
}

std::string missing_on_cpu(const Family& family, const Device& device) {
  if (!device.compiled.contains(family.isa)) {
    return std::string("this build has no ") + cpu::kIsaNames[static_cast<std::size_t>(family.isa)];
  }
  return std::string("this machine lacks ") + family.requires_;
}

std::string explain_cpu(const Family& chosen, const Problem& p, const Gradients* gradients,
                        const Device& device, const cpu::Plan& plan) {
  std::string why = short_dtype(p.dtype);
  why += std::string(" on ") + cpu::kIsaNames[static_cast<std::size_t>(chosen.isa)] + " (" +
         plan.engine + ")";
  const Family* faster = faster_than(chosen, p, gradients, device);
  if (faster == nullptr) return why + ": no family of the library is faster for this dtype";
  if (device.forced && usable(device, faster->isa)) {
    return why + ": forced, " + faster->name + " would be faster";
  }
  return why + ": " + faster->name + " would be faster, but " + missing_on_cpu(*faster, device);
}

Decision refused(std::string why) {
  Decision decision;
  decision.status = TILEWISE_UNSUPPORTED;
  decision.why = std::move(why);
  return decision;
}

std::string request_text(const Problem& p, const Gradients* gradients) {
  return std::string(pass_name(gradients)) + " in " + short_dtype(p.dtype) + " with head_dim " +
         std::to_string(p.head_dim);
}

Decision plan_cuda(const Problem& p, const Gradients* gradients, const Device& device) {
  for (auto row = kManifest.rbegin(); row != kManifest.rend(); ++row) {
    if (!can_run(*row, device) || !serves(*row, p, gradients)) continue;
    Decision decision;
    decision.family = &*row;
    return decision;
  }
  const std::string where = device.sm > 0
                                ? "device is CUDA (sm_" + std::to_string(device.sm) + "): "
                                : "device is CUDA: ";
  return refused(where + "this build has no CUDA kernel for a " + request_text(p, gradients) +
                 "; tensors in the memory of the CPU are allowed");
}

Decision plan_cpu(const Problem& p, const Gradients* gradients, const Device& device) {
  const Family& family = cpu_row(instruction_set(device));
  if (!serves(family, p, gradients)) {
    return refused(std::string("device is CPU: no CPU kernel computes a ") +
                   request_text(p, gradients) + "; float32, float16 and bfloat16 up to head_dim " +
                   std::to_string(family.max_head_dim) + " are allowed");
  }
  Decision decision;
  decision.family = &family;
  decision.cpu = gradients == nullptr
                     ? cpu::plan_forward(p, family.isa, device.threads)
                     : cpu::plan_backward(p, *gradients, family.isa, device.threads);
  decision.kernel =
      std::string(family.name) + "." + pass_name(gradients) + "." + short_dtype(p.dtype);
  decision.why = explain_cpu(family, p, gradients, device, decision.cpu);
  return decision;
}

}  // namespace

Decision plan(const Problem& problem, const Gradients* gradients, const Device& device) {
  return device.kind == TILEWISE_CPU ? plan_cpu(problem, gradients, device)
                                     : plan_cuda(problem, gradients, device);
}

const char* short_dtype(int32_t dtype) {
  switch (dtype) {
    case TILEWISE_FLOAT32:
      return "f32";
    case TILEWISE_FLOAT16:
      return "f16";
    case TILEWISE_BFLOAT16:
      return "bf16";
    default:
      return "f8";
  }
}

bool can_run(const Family& family, const Device& device) {
  if (family.device != device.kind) return false;
  if (family.device == TILEWISE_CPU) return usable(device, family.isa);
  return device.sm >= family.sm.first && device.sm <= family.sm.last;
}

}  // namespace tilewise::dispatch
