#include "dispatch/planner.h"

#include <algorithm>

#include "attention/widened_queries.h"
#include "cpu/widen.h"

namespace tilewise::dispatch {
namespace {

// The first CPU family after `chosen` that would be faster for this request.
const cpu::FamilyRow* faster_than(const cpu::FamilyRow& chosen, const Request& request,
                                  const Device& device) {
  for (const cpu::FamilyRow& row : families_of(device).cpu) {
    if (row.isa <= chosen.isa || !row.facts.computes(request)) continue;
    if (!exists_on(row.isa, device.cpu.architecture)) continue;
    const bool known_slower = cpu::usable(device.cpu, row.isa) && !worth_using(device.cpu, row.isa);
    if (row.gains.contains(request.dtypes.q) && !known_slower) return &row;
  }
  return nullptr;
}

std::string explain_refusal(const Request& request, const Device& device) {
  if (device.kind == TILEWISE_CUDA) return refuse_cuda(request, device);
  return "device is CPU: no CPU kernel computes a " + request_text(request) +
         "; float32, float16 and bfloat16 up to head_dim " + std::to_string(kMaxHeadDim) +
         " are allowed";
}

std::string explain_cpu(const Decision& decision, const Request& request, const Device& device) {
  const cpu::FamilyRow& chosen = *decision.cpu_row;
  const std::string why = std::string(short_dtype(request.dtypes.q)) + " on " +
                          cpu::kIsaNames[static_cast<std::size_t>(chosen.isa)] + " (" +
                          decision.cpu.engine + ")";
  const cpu::FamilyRow* faster = faster_than(chosen, request, device);
  if (faster == nullptr) return why + ": no family of the library is faster for this dtype";
  const std::string name = why + ": " + faster->facts.name + " would be faster, but ";
  const WhyNot reason = faster->why_not(request, device.cpu);
  if (reason) return name + reason.text + reason.detail;
  return why + ": forced, " + faster->facts.name + " would be faster";
}

Decision plan_cpu(const Request& request, const Device& device) {
  Decision decision;
  const cpu::FamilyRow& row = families_of(device).of(instruction_set(device.cpu));
  if (!row.facts.computes(request)) return decision;
  decision.status = TILEWISE_OK;
  decision.family = &row.facts;
  decision.cpu_row = &row;
  decision.cpu = row.plan(request, device.cpu);
  return decision;
}

// Calls body(request) with the request that the family of a decision serves: the given one or one
// with widened queries in `memory`.
template <class Body>
auto with_served(const Decision& decision, const Request& request, void* memory, const Body& body) {
  if (!decision.widens_q) return body(request);
  const Problem wide = WidenedQueries(request.problem).problem(memory);
  return body(Request(wide));
}

void widen_queries(const Problem& p, const Problem& wide, const Decision& decision,
                   const Parallel& parallel) {
  if (decision.on_gpu()) {
    cuda::widen_queries(p, wide);
  } else {
    cpu::widen_queries(p, wide, parallel);
  }
}

std::string kernel_name_of(const Decision& decision, const Request& request) {
  return std::string(decision.family->name) + "." + pass_name(request.pass) + "." +
         short_dtype(request.dtypes.q) +
         (request.dtypes.converts_kv() ? std::string(".") + short_dtype(request.dtypes.kv) : "");
}

std::string explanation_of(const Decision& decision, const Request& request, const Request& asked,
                           const Device& device) {
  if (decision.family == nullptr) return explain_refusal(request, device);
  if (device.kind == TILEWISE_CPU) return explain_cpu(decision, request, device);
  return explain_cuda(decision, request, asked, device);
}

}  // namespace

Decision plan(const Request& request, const Device& device) {
  const auto plan_on_device = [&](const Request& served) {
    return device.kind == TILEWISE_CUDA ? plan_cuda(served, device) : plan_cpu(served, device);
  };
  Decision decision = plan_on_device(request);
  if (decision.family != nullptr || !WidenedQueries::possible(request)) return decision;
  // No family that reads float8 queries serves the request.
  const WidenedQueries widened(request.problem);
  decision = plan_on_device(Request(widened.problem(nullptr)));
  decision.widens_q = true;
  decision.q_bytes = widened.bytes();
  return decision;
}

void launch(const Decision& decision, const Request& request, void* workspace,
            const Parallel& parallel) {
  with_served(decision, request, workspace, [&](const Request& served) {
    void* const rest = static_cast<char*>(workspace) + decision.q_bytes;
    if (decision.widens_q) widen_queries(request.problem, served.problem, decision, parallel);
    if (decision.on_gpu()) {
      decision.cuda_row->launch(served, decision.cuda, rest);
    } else {
      decision.cpu_row->launch(served, decision.cpu, rest, parallel);
    }
  });
}

std::string kernel_name(const Decision& decision, const Request& request) {
  if (decision.family == nullptr) return {};
  return with_served(decision, request, nullptr,
                     [&](const Request& served) { return kernel_name_of(decision, served); });
}

std::string explain(const Decision& decision, const Request& request, const Device& device) {
  return with_served(decision, request, nullptr, [&](const Request& served) {
    const bool widened = decision.family != nullptr && decision.widens_q;
    return (widened ? std::string("q of f8 is widened to ") + short_dtype(served.dtypes.q) + "; "
                    : std::string()) +
           explanation_of(decision, served, request, device);
  });
}

std::string request_text(const Request& request) {
  const Dtypes& dtypes = request.dtypes;
  return std::string(pass_name(request.pass)) + " in " + short_dtype(dtypes.q) +
         (dtypes.out != dtypes.q ? std::string(" with out in ") + short_dtype(dtypes.out) : "") +
         " with head_dim " + std::to_string(request.problem.head_dim);
}

bool can_run(const cpu::FamilyRow& family, const Device& device) {
  return device.kind == TILEWISE_CPU && cpu::usable(device.cpu, family.isa);
}

bool can_run(const cuda::FamilyRow& family, const Device& device) {
  if (device.kind != TILEWISE_CUDA || !family.sm.contains(device.gpu.sm) ||
      !family.serves_on(device.gpu))
    return false;
  const cuda::Registry& all = registry_of(device);
  return std::any_of(
      all.kernel_sets.begin(), all.kernel_sets.end(), [&](const cuda::KernelSet* kernel_set) {
        return kernel_set->family == &family && all.runs(kernel_set->architecture, device.gpu.sm);
      });
}

}  // namespace tilewise::dispatch
