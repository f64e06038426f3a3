// Calls of the CUDA runtime, which is linked statically: without a driver the library loads and
// reports no GPU.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/arch/limits.h"
#include "cuda/runtime.h"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next call would report again
  throw Error(std::string(what) + ": " + cudaGetErrorString(status) + " (" +
              cudaGetErrorName(status) + ")");
}

struct GpuFacts {
  Gpu gpu;
  std::string name;
  int64_t memory_bytes = 0;
};

struct Machine {
  std::vector<GpuFacts> gpus;
  std::string why;  // the reason if there is no GPU
};

int32_t attribute(int32_t index, cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
  return value;
}

// In GB/s. Memory transfers twice per clock (DDR).
int32_t memory_speed(int64_t kilohertz, int64_t bits) {
  return static_cast<int32_t>(2 * kilohertz * bits / 8 / 1000000);
}

GpuFacts describe(int32_t index) {
  GpuFacts facts;
  facts.gpu.sm = attribute(index, cudaDevAttrComputeCapabilityMajor) * 10 +
                 attribute(index, cudaDevAttrComputeCapabilityMinor);
  facts.gpu.sm_count = attribute(index, cudaDevAttrMultiProcessorCount);
  facts.gpu.shared_bytes = attribute(index, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.gpu.l2_bytes = attribute(index, cudaDevAttrL2CacheSize);
  facts.gpu.memory_speed = memory_speed(attribute(index, cudaDevAttrMemoryClockRate),
                                        attribute(index, cudaDevAttrGlobalMemoryBusWidth));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  facts.name = properties.name;
  facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return facts;
}

std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// A driver runs code that was built with a toolkit of the driver's major version or an older one.
std::string why_no_gpu(cudaError_t status) {
  const int32_t driver = cuda_versions().driver;
  if (driver == 0) return "this machine has no NVIDIA driver: libcuda.so.1 cannot be loaded";
  if (status == cudaErrorInsufficientDriver) {
    return "this machine's driver supports CUDA up to " + cuda_version(driver) +
           ", but this library was built with CUDA " + cuda_version(CUDART_VERSION) +
           ": a newer driver is needed, or a build from source with an older nvcc";
  }
  std::string why = cudaGetErrorString(status);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (status == cudaErrorNoDevice && visible != nullptr)
    why += std::string(" (CUDA_VISIBLE_DEVICES is \"") + visible + "\")";
  return why;
}

Machine describe_machine() {
  Machine machine;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    machine.why = why_no_gpu(status);
    return machine;
  }
  if (count == 0) machine.why = "the driver lists no GPU";
  for (int32_t i = 0; i < count; ++i) machine.gpus.push_back(describe(i));
  return machine;
}

const Machine& machine() {
  static const Machine found = describe_machine();
  return found;
}

const GpuFacts& facts(int32_t index) {
  const Machine& m = machine();
  if (index < 0 || index >= static_cast<int32_t>(m.gpus.size())) {
    throw Error("there is no GPU " + std::to_string(index) + ": this machine has " +
                std::to_string(m.gpus.size()) + (m.why.empty() ? "" : " (" + m.why + ")"));
  }
  return m.gpus[static_cast<std::size_t>(index)];
}

// Limits up to which a kernel needs no function attribute.
constexpr int32_t kDefaultSharedBytes = 48 * 1024;

// What this process knows about a kernel on a device: attributes that it has set and properties
// that it has queried. The facts are in a lock-free hash table that only grows, whose entries are 0
// or a key (key_of). A thread that loses a race only sets the attribute again.
enum class KernelFact : uintptr_t { shared_bytes, large_clusters, waits, does_not_wait };
constexpr std::size_t kTableSize = 8192;  // `find` takes 13 bits of the hash of a key
std::array<std::atomic<uintptr_t>, kTableSize> kernel_facts{};

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

uintptr_t key_of(const void* function, int device, KernelFact what) {
  // The key is unique, because addresses have 48 bits and devices are few.
  const uintptr_t tag = static_cast<uintptr_t>(what) << 8 | static_cast<uintptr_t>(device + 1);
  return reinterpret_cast<uintptr_t>(function) ^ tag << 48;
}

// Whether the table has the key. If `add`, inserts it, unless the table is full.
bool find(uintptr_t key, bool add) {
  std::size_t slot = static_cast<std::size_t>((key * 0x9e3779b97f4a7c15u) >> 51);
  for (std::size_t probe = 0; probe < kTableSize; ++probe, slot = (slot + 1) % kTableSize) {
    uintptr_t found = kernel_facts[slot].load(std::memory_order_acquire);
    if (found == key) return true;
    if (found != 0) continue;
    if (!add) return false;
    if (kernel_facts[slot].compare_exchange_strong(found, key, std::memory_order_acq_rel) ||
        found == key)
      return true;
  }
  return false;
}

void allow(const void* function, int device, cudaFuncAttribute what, int32_t value) {
  const uintptr_t key =
      key_of(function, device,
             what == cudaFuncAttributeMaxDynamicSharedMemorySize ? KernelFact::shared_bytes
                                                                 : KernelFact::large_clusters);
  if (find(key, false)) return;
  check(cudaFuncSetAttribute(function, what, value), "cudaFuncSetAttribute");
  find(key, true);
}

// Whether the kernel's code waits for the preceding launch (griddepcontrol.wait). Code compiled for
// GPUs before sm_90 does not, on any GPU.
bool waits_for_predecessor(const void* function, int device) {
  const uintptr_t waits = key_of(function, device, KernelFact::waits);
  if (find(waits, false)) return true;
  const uintptr_t does_not = key_of(function, device, KernelFact::does_not_wait);
  if (find(does_not, false)) return false;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
  const bool result = attributes.ptxVersion >= 90;
  find(result ? waits : does_not, true);
  return result;
}

// The driver function is looked up by name, because the library does not link to libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode_tiled() {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(kName, &entry, 12000, cudaEnableDefault, &found), kName);
#else
  check(cudaGetDriverEntryPoint(kName, &entry, cudaEnableDefault, &found), kName);
#endif
  if (entry == nullptr) throw Error("the driver has no cuTensorMapEncodeTiled: CUDA 12 is needed");
  return reinterpret_cast<EncodeTiled>(entry);
}

// Driver calls need a current context. Runtime calls create one when they need it, so a thread that
// has launched nothing may have none.
void bind_context() { check(cudaSetDevice(current_device()), "cudaSetDevice"); }

}  // namespace

void encode_tensor_map(TensorMap& map, const TensorMapShape& shape) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static const EncodeTiled encode = find_encode_tiled();
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const auto bytes = [&](int64_t x) { return size(x * shape.element_bytes); };
  const cuuint64_t sizes[] = {size(shape.columns), size(shape.rows), size(shape.heads),
                              size(shape.batches)};
  const cuuint64_t strides[] = {bytes(shape.stride_row), bytes(shape.stride_head),
                                bytes(shape.stride_batch)};
  const auto columns = static_cast<cuuint32_t>(kTensorMapBoxBytes / shape.element_bytes);
  const cuuint32_t box[] = {columns, static_cast<cuuint32_t>(shape.box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type = shape.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : shape.dtype == TILEWISE_BFLOAT16
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto attempt = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map), type, 4, const_cast<void*>(shape.data),
                  sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = attempt();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    bind_context();
    status = attempt();
  }
  if (status == CUDA_SUCCESS) return;
  throw Error("cuTensorMapEncodeTiled refuses [" + std::to_string(shape.batches) + ", " +
              std::to_string(shape.heads) + ", " + std::to_string(shape.rows) + ", " +
              std::to_string(shape.columns) + "] with strides " +
              std::to_string(shape.stride_batch) + ", " + std::to_string(shape.stride_head) + ", " +
              std::to_string(shape.stride_row) + " (CUresult " + std::to_string(status) + ")");
}

CudaVersions cuda_versions() {
  CudaVersions versions{.runtime = CUDART_VERSION};
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess) versions.driver = driver;
  cudaGetLastError();
  return versions;
}

int32_t gpu_count(std::string* why) {
  const Machine& m = machine();
  if (why != nullptr) *why = m.why;
  return static_cast<int32_t>(m.gpus.size());
}

const Gpu& gpu(int32_t index) { return facts(index).gpu; }

std::string gpu_name(int32_t index) { return facts(index).name; }

int64_t gpu_memory_bytes(int32_t index) { return facts(index).memory_bytes; }

DeviceScope::DeviceScope(int32_t index) {
  const int current = current_device();
  if (current == index) return;
  check(cudaSetDevice(index), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

bool is_captured(Stream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
        "cudaStreamIsCapturing");
  return capture != cudaStreamCaptureStatusNone;
}

void read_back(void* to, const void* from, int64_t bytes, Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, s),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
}

std::string kernel_symbol(const void* function) {
  const char* name = nullptr;
  return cudaFuncGetName(&name, function) == cudaSuccess ? name : "a kernel";
}

void* address_on_device(const void* symbol) {
  void* address = nullptr;
  check(cudaGetSymbolAddress(&address, symbol), "cudaGetSymbolAddress");
  return address;
}

void read_and_clear(void* to, void* from, int64_t bytes) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  check(cudaMemset(from, 0, sizeof(uint64_t)), "cudaMemset");
}

namespace detail {
void launch(const void* function, int64_t blocks, int32_t threads, int32_t shared_bytes,
            Stream stream, Start start, int32_t cluster, const void* params) {
  if (blocks > INT32_MAX) {
    throw Error("a grid of " + std::to_string(blocks) + " blocks: at most 2147483647 are allowed");
  }
  const int device = current_device();
  const Gpu& gpu = facts(device).gpu;
  if (shared_bytes > kDefaultSharedBytes) {
    // The GPU's limit instead of `shared_bytes`, because launches of a kernel may differ in it.
    allow(function, device, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_bytes);
  }
  if (cluster > arch::kPortableClusterSize)
    allow(function, device, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  void* arguments[] = {const_cast<void*>(params)};
  std::array<cudaLaunchAttribute, 2> attributes{};
  unsigned count = 0;
  if (start == Start::dependent && gpu.sm >= 90 && waits_for_predecessor(function, device)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes.data();
  config.numAttrs = count;
  const cudaError_t status = cudaLaunchKernelExC(&config, function, arguments);
  if (status == cudaSuccess) return;
  check(status, ("launch of " + kernel_symbol(function) + " with " + std::to_string(blocks) +
                 " blocks of " + std::to_string(threads) + " threads and " +
                 std::to_string(shared_bytes) + " bytes of shared memory")
                    .c_str());
}

}  // namespace detail
}  // namespace tilewise::cuda
