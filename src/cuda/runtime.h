// The library's interface to the CUDA runtime, all of whose calls are in runtime_cuda.cpp. In a
// build for the emulator (runtime_emulator.cpp) the same functions run a grid on the CPU, block by
// block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/launch_list.h"
#include "cuda/tensor_map.h"

#if defined(TILEWISE_EMULATOR)
#include "emulator/grid.h"
#include "emulator/launches.h"
#endif

namespace tilewise::cuda {

using Stream = void*;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A compiled kernel with the resources of its launch.
template <class Params>
struct Kernel {
  void (*function)(Params) = nullptr;
  int32_t threads = 0;
  int32_t shared_bytes = 0;
  int32_t cluster_size = 1;  // CTAs per cluster, when the kernel itself is compiled with one
};

// A family whose row is not `proved`, but whose results and speed a GPU has proved: the planner
// uses its tiles of these head dimensions there (tilewise_set_proof).
struct Proof {
  std::string family;
  std::vector<int32_t> head_dims;

  bool covers(int32_t head_dim) const {
    return std::find(head_dims.begin(), head_dims.end(), head_dim) != head_dims.end();
  }
};

// The properties of a GPU that the planner uses.
struct Gpu {
  int32_t sm = 0;  // compute capability as major * 10 + minor
  int32_t sm_count = 0;
  int32_t shared_bytes = 0;  // maximum per CTA (opt-in)
  int32_t l2_bytes = 0;
  int32_t memory_speed = 0;  // GB/s, from clock and bus width; 0: unknown
  int32_t table = 0;         // tile table forced by TILEWISE_FORCE_ARCH; 0: that of arch/limits.h
  bool takes_unproved = false;  // TILEWISE_UNPROVED=1: families that no GPU has proved are used
  std::span<const Proof> proofs = {};  // valid until the process ends

  const Proof* proof_of(std::string_view family) const {
    for (const Proof& proof : proofs) {
      if (proof.family == family) return &proof;
    }
    return nullptr;
  }
};

// 1000 * major + 10 * minor; 0 if there is none.
struct CudaVersions {
  int32_t runtime = 0;  // linked into this library
  int32_t driver = 0;   // the newest that the driver supports
};
CudaVersions cuda_versions();

// Number of GPUs. It is 0 without a driver or a GPU; then `why`, if given, receives the reason.
int32_t gpu_count(std::string* why = nullptr);
// Properties of GPU `index`, queried once per process. Throws Error if there is no such GPU.
const Gpu& gpu(int32_t index);
std::string gpu_name(int32_t index);
int64_t gpu_memory_bytes(int32_t index);

// Makes a GPU the current device within a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t index);
#if defined(TILEWISE_EMULATOR)
  ~DeviceScope() noexcept(false);  // runs a launch that was held back, which may throw
#else
  ~DeviceScope();
#endif
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  [[maybe_unused]] int32_t previous_ = -1;  // builds without CUDA do not need it
};

// Encodes a tensor map. Throws Error if the driver refuses the shape.
void encode_tensor_map(TensorMap& map, const TensorMapShape& shape);

// Whether the stream is being captured into a graph. Waiting for it is not allowed then.
bool is_captured(Stream stream);

// Copies to host memory after all work on the stream, and waits for the copy.
void read_back(void* to, const void* from, int64_t bytes, Stream stream);

// Address of a __device__ variable in the memory of the current GPU.
void* address_on_device(const void* symbol);

// Waits for all work of the current GPU, copies `bytes` bytes to host memory, and then sets the
// first 8 bytes of `from` to 0.
void read_and_clear(void* to, void* from, int64_t bytes);

// When a kernel may start. A `dependent` kernel starts as soon as every CTA of the preceding kernel
// on the stream, whether of this library or not, has triggered the launch or exited (PDL). It must
// wait (ptx::griddepcontrol_wait) before it writes global memory, and before it reads what its
// predecessor may write or has not itself waited for. (The combine kernel reads index arrays first,
// which are complete before any main kernel triggers it.) At least one of its CTAs must wait in any
// case, so that it does not complete before its predecessor. GPUs before sm_90, and code compiled
// for them, start kernels in order.
enum class Start { in_order, dependent };

namespace detail {
void launch(const void* function, int64_t blocks, int32_t threads, int32_t shared_bytes,
            Stream stream, Start start, int32_t cluster, const void* params);
}

// Launches a grid of `blocks` CTAs; does nothing if that is 0. It neither allocates nor waits.
// `cluster` is the cluster size of a kernel that is not compiled with one.
template <class Params>
void launch(const Kernel<Params>& kernel, int64_t blocks, Stream stream, const Params& params,
            Start start = Start::in_order, int32_t cluster = 1) {
  if (blocks == 0) return;
  if (lists_launches()) list_launch(reinterpret_cast<const void*>(kernel.function));
#if defined(TILEWISE_EMULATOR)
  (void)stream;
  emulator::launch(start == Start::dependent, [=] {
    emulator::run_grid(
        blocks, kernel.threads, kernel.shared_bytes, [&] { kernel.function(params); },
        kernel.cluster_size * cluster);
  });
#else
  detail::launch(reinterpret_cast<const void*>(kernel.function), blocks, kernel.threads,
                 kernel.shared_bytes, stream, start, cluster, &params);
#endif
}

}  // namespace tilewise::cuda
