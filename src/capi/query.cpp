// Queries about the library and the machine.
#include <cstdio>

#include "base/parallel.h"
#include "capi/refusal.h"
#include "capi/versioned.h"
#include "capi/views.h"
#include "dispatch/planner.h"

using namespace tilewise;

namespace {

// Row `index` of the support matrix in the C ABI: the families of the library, one row per dtype.
struct Row {
  const FamilyFacts* facts;
  bool proved;
  tilewise_device device;
  int32_t dtype;
  bool available;  // on the CPU or a GPU of this machine
};

bool runs_here(const cpu::FamilyRow& family) {
  return dispatch::can_run(family, dispatch::this_cpu(1));
}
bool runs_here(const cuda::FamilyRow& family) {
  for (int32_t i = 0; i < cuda::gpu_count(); ++i) {
    if (dispatch::can_run(family, dispatch::this_gpu(i))) return true;
  }
  return false;
}

bool is_proved(const cpu::FamilyRow&) { return true; }
bool is_proved(const cuda::FamilyRow& family) { return family.proved; }

Row matrix_row(int32_t index) {
  Row found{};
  int32_t row = 0;
  const auto visit = [&](const auto& family, tilewise_device device) {
    for (int32_t dtype = TILEWISE_FLOAT32; dtype <= TILEWISE_FLOAT8_E4M3; ++dtype) {
      if (!family.facts.dtypes.contains(dtype)) continue;
      if (row++ == index)
        found = {&family.facts, is_proved(family), device, dtype, runs_here(family)};
    }
  };
  for (const cpu::FamilyRow& family : dispatch::families().cpu)
    if (exists_on(family.isa, cpu::kArchitecture)) visit(family, TILEWISE_CPU);
  for (const cuda::FamilyRow* family : dispatch::families().cuda) visit(*family, TILEWISE_CUDA);
  if (found.facts == nullptr)
    capi::refuse(TILEWISE_INVALID_ARGUMENT, "index is ", index, ": it must be 0 to ", row - 1);
  return found;
}

tilewise_kernel_info describe(const Row& row) {
  const FamilyFacts& facts = *row.facts;
  tilewise_kernel_info info{};
  info.device = row.device;
  info.dtype = row.dtype;
  info.max_head_dim = facts.max_head_dim_of(Pass::forward, row.dtype);
  info.forward = facts.has(Pass::forward, row.dtype) ? 1 : 0;
  info.backward = facts.has(Pass::backward, row.dtype) ? 1 : 0;
  info.jvp = facts.has(Pass::jvp, row.dtype) ? 1 : 0;
  info.second = facts.has(Pass::second, row.dtype) ? 1 : 0;
  info.available = row.available ? 1 : 0;
  info.proved = row.proved ? 1 : 0;
  std::snprintf(info.name, sizeof(info.name), "%s", facts.name);
  const bool emulated = row.device == TILEWISE_CUDA && cuda::registry().emulated;
  std::snprintf(info.requires_, sizeof(info.requires_), "%s",
                emulated ? "nothing: emulated on this CPU, for tests" : facts.requires_);
  return info;
}

}  // namespace

const char* tilewise_version(void) { return TILEWISE_VERSION_STRING; }

uint32_t tilewise_abi_version(void) { return TILEWISE_ABI_VERSION; }

const char* tilewise_last_error(void) { return capi::last_error(); }

const char* tilewise_cpu_isa(int32_t index, int32_t* available) {
  int32_t compiled = 0;
  for (std::size_t i = 0; i < cpu::kIsaNames.size(); ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    if (!cpu::compiled(isa)) continue;
    if (compiled++ != index) continue;
    if (available != nullptr) *available = cpu::available(isa) ? 1 : 0;
    return cpu::kIsaNames[i];
  }
  return nullptr;
}

const char* tilewise_current_cpu(void) {
  const cpu::Isa isa = cpu::instruction_set(dispatch::this_cpu(1).cpu);
  return cpu::kIsaNames[static_cast<std::size_t>(isa)];
}

tilewise_status tilewise_select_cpu(const char* name) {
  return capi::guarded([&] {
    const std::string problem = dispatch::select_isa(name);
    capi::require(problem.empty(), problem);
  });
}

int32_t tilewise_cpu_threads(void) { return pool_threads(); }

tilewise_status tilewise_kernel(int32_t index, tilewise_kernel_info* info) {
  return capi::guarded([&] {
    capi::check_struct_size(info, "info");
    capi::write_struct(describe(matrix_row(index)), info);
  });
}
