#include "dispatch/device.h"

#include <array>
#include <atomic>
#include <cstdlib>

#include "base/parallel.h"
#include "dispatch/manifest.h"

namespace tilewise::dispatch {
namespace {

constexpr std::size_t kIsaCount = cpu::kIsaNames.size();

Device describe_hardware() {
  Device device;
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    if (cpu::compiled(isa)) device.compiled = device.compiled.with(isa);
    if (cpu::available(isa)) device.runnable = device.runnable.with(isa);
  }
  // best_available skips AVX512-BF16 on cores where its dot product is slow.
  device.slow_bf16_dot =
      usable(device, cpu::Isa::avx512_bf16) && cpu::best_available() < cpu::Isa::avx512_bf16;
  return device;
}

// CPUID does not change while a process runs.
const Device& hardware() {
  static const Device device = describe_hardware();
  return device;
}

std::string names(bool (*wanted)(const Device&, cpu::Isa)) {
  std::string list;
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    if (!wanted(hardware(), static_cast<cpu::Isa>(i))) continue;
    if (!list.empty()) list += ", ";
    list += cpu::kIsaNames[i];
  }
  return list;
}

struct Request {
  std::optional<cpu::Isa> isa;
  std::string problem;
};

Request parse(const char* argument, const std::string& name) {
  Request request;
  const std::string given = argument + (" is \"" + name + "\": ");
  const std::string allowed = "; on this machine it must be one of " + names(usable);
  for (std::size_t i = 0; i < kIsaCount; ++i) {
    if (name == cpu::kIsaNames[i]) request.isa = static_cast<cpu::Isa>(i);
  }
  if (!request.isa) {
    request.problem = given + "no instruction set has this name" + allowed;
  } else if (!hardware().compiled.contains(*request.isa)) {
    request.problem = given + "this build has no code for it" + allowed;
  } else if (!hardware().runnable.contains(*request.isa)) {
    request.problem = given + "this machine lacks " + cpu_row(*request.isa).requires_ + allowed;
  }
  return request;
}

const Request& environment() {
  static const Request request = [] {
    const char* name = std::getenv("TILEWISE_CPU");
    return name != nullptr && *name != '\0' ? parse("TILEWISE_CPU", name) : Request{};
  }();
  return request;
}

// What select_isa was last called with: an instruction set, kBest for null, or kNotSelected before
// the first call.
constexpr int32_t kNotSelected = -1;
constexpr int32_t kBest = -2;
std::atomic<int32_t> selection{kNotSelected};

}  // namespace

bool usable(const Device& device, cpu::Isa isa) {
  return device.compiled.contains(isa) && device.runnable.contains(isa);
}

bool worth_using(const Device& device, cpu::Isa isa) {
  return usable(device, isa) && !(device.slow_bf16_dot && isa == cpu::Isa::avx512_bf16);
}

cpu::Isa instruction_set(const Device& device) {
  if (device.forced) return *device.forced;
  for (std::size_t i = kIsaCount; i-- > 0;) {
    if (worth_using(device, static_cast<cpu::Isa>(i))) return static_cast<cpu::Isa>(i);
  }
  return cpu::Isa::portable;
}

Device this_cpu(int32_t threads) {
  Device device = hardware();
  device.threads = threads;
  const int32_t selected = selection.load(std::memory_order_relaxed);
  if (selected >= 0) {
    device.forced = static_cast<cpu::Isa>(selected);
  } else if (selected == kNotSelected && environment().problem.empty()) {
    device.forced = environment().isa;
  }
  return device;
}

std::string select_isa(const char* name) {
  if (name == nullptr) {
    selection.store(kBest, std::memory_order_relaxed);
    return {};
  }
  const Request request = parse("name", name);
  if (request.problem.empty()) {
    selection.store(static_cast<int32_t>(*request.isa), std::memory_order_relaxed);
  }
  return request.problem;
}

std::string environment_problem() {
  if (std::string threads = pool_problem(); !threads.empty()) return threads;
  return selection.load(std::memory_order_relaxed) == kNotSelected ? environment().problem
                                                                   : std::string();
}

}  // namespace tilewise::dispatch
