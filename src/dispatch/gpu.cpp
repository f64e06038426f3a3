// The GPUs of this machine, as the planner sees them.
#include <algorithm>
#include <cstdlib>
#include <set>

#include "cuda/arch/limits.h"
#include "dispatch/device.h"
#include "dispatch/proofs.h"

namespace tilewise::dispatch {
namespace {

constexpr const char* kForceVariable = "TILEWISE_FORCE_ARCH";
constexpr const char* kUnprovedVariable = "TILEWISE_UNPROVED";
constexpr int32_t kNoTable = -1;  // the variable does not name a table

bool is_table(int32_t number) {
  return std::any_of(cuda::arch::kLimits.begin(), cuda::arch::kLimits.end(),
                     [&](const cuda::arch::Limits& row) { return row.table == number; });
}

std::string tables() {
  std::set<int32_t> all;
  for (const cuda::arch::Limits& row : cuda::arch::kLimits) all.insert(row.table);
  std::string text;
  for (int32_t table : all) text += (text.empty() ? "" : ", ") + std::to_string(table);
  return text;
}

// The table that TILEWISE_FORCE_ARCH names; 0: it is not set.
int32_t forced_table() {
  static const int32_t forced = [] {
    const char* text = std::getenv(kForceVariable);
    if (text == nullptr || *text == '\0') return 0;
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    const bool whole = *end == '\0' && number > 0 && number < 1000;
    return whole && is_table(static_cast<int32_t>(number)) ? static_cast<int32_t>(number)
                                                           : kNoTable;
  }();
  return forced;
}

// "1": families that are not proved are used; "0": none of them, whatever has been proved.
const std::string& unproved_setting() {
  static const std::string setting = [] {
    const char* text = std::getenv(kUnprovedVariable);
    return std::string(text != nullptr ? text : "");
  }();
  return setting;
}

void append_list(std::string& text, const char* what, const std::set<int32_t>& sms) {
  if (sms.empty()) return;
  if (!text.empty()) text += " and ";
  text += what;
  const char* comma = " of ";
  for (int32_t sm : sms) {
    text += comma + ("sm_" + std::to_string(sm));
    comma = ", ";
  }
}

}  // namespace

const cuda::Registry& registry_of(const Device& device) {
  return device.registry != nullptr ? *device.registry : cuda::registry();
}

const Families& families_of(const Device& device) {
  return device.families != nullptr ? *device.families : families();
}

int32_t tile_table(const Device& device) {
  return cuda::arch::table_of(device.gpu.sm, device.gpu.table);
}

std::string code_text(const cuda::Registry& registry) {
  if (registry.emulated) return "code for the emulator of the tests";
  std::set<int32_t> sass;
  std::set<int32_t> ptx;
  for (const cuda::Code& code : registry.code) {
    sass.insert(code.sass.begin(), code.sass.end());
    ptx.insert(code.ptx.begin(), code.ptx.end());
  }
  std::string text;
  append_list(text, "SASS", sass);
  append_list(text, "PTX", ptx);
  return text.empty() ? "no CUDA code" : text;
}

Device this_gpu(int32_t index) {
  Device device;
  device.kind = TILEWISE_CUDA;
  device.gpu = cuda::gpu(index);
  device.gpu.takes_unproved = unproved_setting() == "1";
  if (unproved_setting() != "0") device.gpu.proofs = proofs_of(index);
  const int32_t table = forced_table();
  if (table == 0) return device;
  device.gpu.table = table;
  // The plan must fit the GPUs that the table is for.
  if (table > 0) {
    device.gpu.shared_bytes =
        std::min(device.gpu.shared_bytes, cuda::arch::limits_of(table).shared_bytes);
  }
  return device;
}

std::string forced_table_problem(const Device& device) {
  const int32_t table = device.gpu.table;
  if (table == 0) return {};
  if (table == kNoTable) {
    return kForceVariable + (" is \"" + std::string(std::getenv(kForceVariable)) +
                             "\": it must be one of " + tables());
  }
  if (registry_of(device).runs(table, device.gpu.sm)) return {};
  return kForceVariable + (" is " + std::to_string(table)) +
         ": this build has no code of that tile table " + "that a GPU with sm_" +
         std::to_string(device.gpu.sm) + " runs; it has " + code_text(registry_of(device));
}

}  // namespace tilewise::dispatch
