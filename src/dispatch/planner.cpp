#include "dispatch/planner.h"

#include <algorithm>

namespace tilewise::dispatch {
namespace {

// The first CPU family after `chosen` that would be faster for this problem.
const Family* faster_than(const Family& chosen, const Request& request, const Device& device) {
  for (const Family* row = &chosen + 1; row != kManifest.data() + kManifest.size(); ++row) {
    if (row->device != chosen.device || !serves(*row, request)) continue;
    const bool known_slower = usable(device, row->isa) && !worth_using(device, row->isa);
    if (row->gains.contains(request.problem.dtype) && !known_slower) return row;
  }
  return nullptr;
}

std::string missing_on_cpu(const Family& family, const Device& device) {
  if (!device.compiled.contains(family.isa)) {
    return std::string("this build has no ") + cpu::kIsaNames[static_cast<std::size_t>(family.isa)];
  }
  return std::string("this machine lacks ") + family.requires_;
}

std::string explain_refusal(const Request& request, const Device& device) {
  if (device.kind == TILEWISE_CUDA) return refuse_cuda(request, device);
  return "device is CPU: no CPU kernel computes a " + request_text(request) +
         "; float32, float16 and bfloat16 up to head_dim " + std::to_string(kMaxHeadDim) +
         " are allowed";
}

std::string explain_cpu(const Decision& decision, const Request& request, const Device& device) {
  const Family& chosen = *decision.family;
  const std::string why = std::string(short_dtype(request.problem.dtype)) + " on " +
                          cpu::kIsaNames[static_cast<std::size_t>(chosen.isa)] + " (" +
                          decision.cpu.engine + ")";
  const Family* faster = faster_than(chosen, request, device);
  if (faster == nullptr) return why + ": no family of the library is faster for this dtype";
  if (device.forced && usable(device, faster->isa)) {
    return why + ": forced, " + faster->name + " would be faster";
  }
  return why + ": " + faster->name + " would be faster, but " + missing_on_cpu(*faster, device);
}

const Family* cpu_family_for(const Request& request, const Device& device) {
  const Family& family = cpu_row(instruction_set(device));
  return serves(family, request) ? &family : nullptr;
}

}  // namespace

Decision plan(const Request& request, const Device& device) {
  if (device.kind == TILEWISE_CUDA) return plan_cuda(request, device);
  Decision decision;
  decision.family = cpu_family_for(request, device);
  if (decision.family == nullptr) return decision;
  decision.status = TILEWISE_OK;
  decision.cpu = cpu::plan(request, decision.family->isa, device.threads);
  return decision;
}

std::string kernel_name(const Decision& decision, const Request& request) {
  if (decision.family == nullptr) return {};
  return std::string(decision.family->name) + "." + pass_name(request.pass) + "." +
         short_dtype(request.problem.dtype) + (request.problem.kv_float8 != 0 ? ".f8" : "");
}

std::string explain(const Decision& decision, const Request& request, const Device& device) {
  if (decision.family == nullptr) return explain_refusal(request, device);
  if (device.kind == TILEWISE_CPU) return explain_cpu(decision, request, device);
  return explain_cuda(decision, request, device);
}

std::string request_text(const Request& request) {
  return std::string(pass_name(request.pass)) + " in " + short_dtype(request.problem.dtype) +
         " with head_dim " + std::to_string(request.problem.head_dim);
}

bool serves(const Family& family, const Request& request) {
  const Problem& p = request.problem;
  return family.dtypes.contains(p.dtype) && p.head_dim <= family.max_head_dim &&
         p.head_dim_v <= family.max_head_dim &&
         (request.is(Pass::forward) ? family.forward : family.backward);
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
