#include "dispatch/device.h"

#include <atomic>
#include <cstdlib>

#include "base/parallel.h"

namespace tilewise::dispatch {
namespace {

constexpr std::size_t kIsaCount = cpu::kIsaNames.size();

// CPUID does not change while a process runs.
const cpu::Machine& hardware() {
  static const cpu::Machine machine = cpu::this_machine();
  return machine;
}

std::string usable_isas() {
  std::string list;
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    if (!cpu::usable(hardware(), static_cast<cpu::Isa>(i))) continue;
    if (!list.empty()) list += ", ";
    list += cpu::kIsaNames[i];
  }
  return list;
}

struct IsaChoice {
  std::optional<cpu::Isa> isa;
  std::string problem;
};

IsaChoice parse(const char* argument, const std::string& name) {
  IsaChoice choice;
  const std::string given = argument + (" is \"" + name + "\": ");
  const std::string allowed = "; on this machine it must be one of " + usable_isas();
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    if (name == cpu::kIsaNames[i]) choice.isa = static_cast<cpu::Isa>(i);
  }
  if (!choice.isa) {
    choice.problem = given + "no instruction set has this name" + allowed;
  } else if (!hardware().compiled.contains(*choice.isa)) {
    choice.problem = given + "this build has no code for it" + allowed;
  } else if (!hardware().runnable.contains(*choice.isa)) {
    choice.problem =
        given + "this machine lacks " + families().of(*choice.isa).facts.requires_ + allowed;
  }
  return choice;
}

const IsaChoice& environment() {
  static const IsaChoice choice = [] {
    const char* name = std::getenv("TILEWISE_CPU");
    return name != nullptr && *name != '\0' ? parse("TILEWISE_CPU", name) : IsaChoice{};
  }();
  return choice;
}

// What select_isa was last called with: an instruction set, kBest for null, or kNotSelected before
// the first call.
constexpr int32_t kNotSelected = -1;
constexpr int32_t kBest = -2;
std::atomic<int32_t> selection{kNotSelected};

}  // namespace

Device this_cpu(int32_t threads) {
  Device device;
  device.cpu = hardware();
  device.cpu.threads = threads;
  const int32_t selected = selection.load(std::memory_order_relaxed);
  if (selected >= 0) {
    device.cpu.forced = static_cast<cpu::Isa>(selected);
  } else if (selected == kNotSelected && environment().problem.empty()) {
    device.cpu.forced = environment().isa;
  }
  return device;
}

std::string select_isa(const char* name) {
  if (name == nullptr) {
    selection.store(kBest, std::memory_order_relaxed);
    return {};
  }
  const IsaChoice choice = parse("name", name);
  if (choice.problem.empty()) {
    selection.store(static_cast<int32_t>(*choice.isa), std::memory_order_relaxed);
  }
  return choice.problem;
}

std::string environment_problem() {
  if (std::string threads = pool_problem(); !threads.empty()) return threads;
  return selection.load(std::memory_order_relaxed) == kNotSelected ? environment().problem
                                                                   : std::string();
}

}  // namespace tilewise::dispatch
