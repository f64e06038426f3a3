#include "dispatch/planner.h"

#include <algorithm>

namespace tilewise::dispatch {
namespace {

const char* pass_name(const Gradients* gradients) {
  return gradients == nullptr ? "forward" : "backward";
}

// The first CPU family after `chosen` that would be faster for this problem.
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

std::string explain_refusal(const Problem& p, const Gradients* gradients, const Device& device) {
  if (device.kind == TILEWISE_CUDA) return refuse_cuda(p, gradients, device);
  return "device is CPU: no CPU kernel computes a " + request_text(p, gradients) +
         "; float32, float16 and bfloat16 up to head_dim " + std::to_string(kMaxHeadDim) +
         " are allowed";
}

std::string explain_cpu(const Decision& decision, const Problem& p, const Gradients* gradients,
                        const Device& device) {
  const Family& chosen = *decision.family;
  const std::string why = std::string(short_dtype(p.dtype)) + " on " +
                          cpu::kIsaNames[static_cast<std::size_t>(chosen.isa)] + " (" +
                          decision.cpu.engine + ")";
  const Family* faster = faster_than(chosen, p, gradients, device);
  if (faster == nullptr) return why + ": no family of the library is faster for this dtype";
  if (device.forced && usable(device, faster->isa)) {
    return why + ": forced, " + faster->name + " would be faster";
  }
  return why + ": " + faster->name + " would be faster, but " + missing_on_cpu(*faster, device);
}

const Family* cpu_family_for(const Problem& p, const Gradients* gradients, const Device& device) {
  const Family& family = cpu_row(instruction_set(device));
  return serves(family, p, gradients) ? &family : nullptr;
}

}  // namespace

Decision plan(const Problem& problem, const Gradients* gradients, const Device& device) {
  if (device.kind == TILEWISE_CUDA) return plan_cuda(problem, gradients, device);
  Decision decision;
  decision.family = cpu_family_for(problem, gradients, device);
  if (decision.family == nullptr) return decision;
  decision.status = TILEWISE_OK;
  const cpu::Isa isa = decision.family->isa;
  decision.cpu = gradients == nullptr
                     ? cpu::plan_forward(problem, isa, device.threads)
                     : cpu::plan_backward(problem, *gradients, isa, device.threads);
  return decision;
}

std::string kernel_name(const Decision& decision, const Problem& problem,
                        const Gradients* gradients) {
  if (decision.family == nullptr) return {};
  return std::string(decision.family->name) + "." + pass_name(gradients) + "." +
         short_dtype(problem.dtype) + (problem.kv_float8 != 0 ? ".f8" : "");
}

std::string explain(const Decision& decision, const Problem& problem, const Gradients* gradients,
                    const Device& device) {
  if (decision.family == nullptr) return explain_refusal(problem, gradients, device);
  if (device.kind == TILEWISE_CPU) return explain_cpu(decision, problem, gradients, device);
  return explain_cuda(decision, problem, gradients, device);
}

std::string request_text(const Problem& p, const Gradients* gradients) {
  return std::string(pass_name(gradients)) + " in " + short_dtype(p.dtype) + " with head_dim " +
         std::to_string(p.head_dim);
}

bool serves(const Family& family, const Problem& p, const Gradients* gradients) {
  return family.dtypes.contains(p.dtype) && p.head_dim <= family.max_head_dim &&
         p.head_dim_v <= family.max_head_dim &&
         (gradients == nullptr ? family.forward : family.backward);
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
  const cuda::Registry& all = registry_of(device);
  const int32_t sm = device.gpu.sm;
  return sm >= family.sm.first && sm <= family.sm.last &&
         std::any_of(all.kernel_sets.begin(), all.kernel_sets.end(),
                     [&](const cuda::KernelSet* kernel_set) {
                       return kernel_set->family == family.cuda &&
                              all.runs(kernel_set->architecture, sm);
                     });
}

}  // namespace tilewise::dispatch
