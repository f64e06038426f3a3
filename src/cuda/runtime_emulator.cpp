// The runtime of builds for the emulator (tests/emulator). TILEWISE_EMULATOR_SM and
// TILEWISE_EMULATOR_MULTIPROCESSORS describe its GPU.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>

#include "cuda/arch/limits.h"
#include "cuda/runtime.h"
#include "emulator/bulk.h"
#include "emulator/launches.h"

namespace tilewise::cuda {
namespace {

// Few SMs, so that small problems already have several waves.
constexpr int32_t kDefaultSmCount = 4;
constexpr int32_t kL2Bytes = 4 << 20;
// GB/s. Chosen so that decodes use fewer stages when all SMs read than when most do
// (choose_stages).
constexpr int32_t kMemorySpeedPerSm = 32;

int32_t setting(const char* variable, int32_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

Gpu describe() {
  const int32_t sm = setting("TILEWISE_EMULATOR_SM", 90);
  const int32_t shared = sm >= 75 ? arch::limits_of(sm).shared_bytes : 48 * arch::kKilobyte;
  const int32_t sm_count = setting("TILEWISE_EMULATOR_MULTIPROCESSORS", kDefaultSmCount);
  return {.sm = sm,
          .sm_count = sm_count,
          .shared_bytes = shared,
          .l2_bytes = kL2Bytes,
          .memory_speed = kMemorySpeedPerSm * sm_count};
}

}  // namespace

CudaVersions cuda_versions() { return {}; }

int32_t gpu_count(std::string* why) {
  if (why != nullptr) why->clear();
  return 1;
}

const Gpu& gpu(int32_t index) {
  if (index != 0) throw Error("GPU " + std::to_string(index) + ": the emulator has GPU 0");
  static const Gpu emulated = describe();
  return emulated;
}

std::string gpu_name(int32_t index) {
  return "emulated GPU (sm_" + std::to_string(gpu(index).sm) + ")";
}

int64_t gpu_memory_bytes(int32_t) { return 0; }  // not known: it is the CPU's memory

std::string kernel_symbol(const void* function) {
  Dl_info info{};
  dladdr(function, &info);
  std::ostringstream text;
  text << "+0x" << std::hex
       << static_cast<const char*>(function) - static_cast<const char*>(info.dli_fbase);
  return text.str();
}

DeviceScope::DeviceScope(int32_t index) { gpu(index); }
DeviceScope::~DeviceScope() noexcept(false) {
  if (std::uncaught_exceptions() > 0)
    emulator::drop_launches();
  else
    emulator::finish_launches();
}

void encode_tensor_map(TensorMap& map, const TensorMapShape& shape) {
  emulator::encode_tensor_map(map, shape);
}

bool is_captured(Stream stream) { return stream == emulator::captured_stream(); }

void* address_on_device(const void* symbol) { return const_cast<void*>(symbol); }

void read_and_clear(void* to, void* from, int64_t bytes) {
  emulator::finish_launches();
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
  std::memset(from, 0, sizeof(uint64_t));
}

void read_back(void* to, const void* from, int64_t bytes, Stream) {
  emulator::finish_launches();
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace tilewise::cuda
