// The CUDA runtime as the library uses it: every call to it is in runtime_cuda.cpp. Compiled for
// the emulator (runtime_emulator.cpp) the same functions run a grid on this CPU, block after block.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/launch_list.h"
#include "cuda/tensor_map.h"

#if defined(TILEWISE_EMULATOR)
#include "emulator/grid.h"
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

// What the planner needs to know of a GPU.
struct Gpu {
  int32_t sm = 0;  // compute capability as major * 10 + minor
  int32_t sm_count = 0;
  int32_t shared_bytes = 0;  // a block may opt in to
  int32_t l2_bytes = 0;
  int32_t memory_speed = 0;  // gigabytes a second, by clock and bus; 0: not known
  int32_t table = 0;         // tile table to use (TILEWISE_FORCE_ARCH); 0: that of arch/limits.h
};

// 0 when there is no driver or no GPU; the reason goes to `why` when it is given.
int32_t gpu_count(std::string* why = nullptr);
// Facts of GPU `index`, asked once. Throws Error when there is no such GPU.
const Gpu& gpu(int32_t index);
std::string gpu_name(int32_t index);
int64_t gpu_memory_bytes(int32_t index);

// Makes a GPU current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int32_t previous_ = -1;
};

// Throws Error when the driver refuses the shape.
void encode_tensor_map(TensorMap& map, const TensorMapShape& shape);

// Whether the stream records a graph: nobody may wait for it then.
bool is_captured(Stream stream);

// Waits for everything on the stream, and copies to the memory of the host.
void read_back(void* to, const void* from, int64_t bytes, Stream stream);

// Where a variable of the kernels' code is in the memory of the current GPU.
void* address_on_device(const void* symbol);

// Waits for all work of the current GPU, copies to the memory of the host, and makes the first 8
// bytes 0.
void read_and_clear(void* to, void* from, int64_t bytes);

// When a kernel may start. `dependent`: as soon as every block of the kernel before it, whoever
// launched that, has asked for it or is done. It waits itself before it reads or writes anything
// (ptx::griddepcontrol_wait), one of its blocks at least, so that it is complete no sooner than
// what came before. GPUs before sm_90 start in order, and so does code compiled for them.
enum class Start { in_order, dependent };

namespace detail {
void launch(const void* function, int64_t blocks, int32_t threads, int32_t shared_bytes,
            Stream stream, Start start, int32_t cluster, const void* params);
}

// Starts `blocks` blocks (none: does nothing). Allocates nothing, waits for nothing. `cluster`:
// blocks that run side by side, of a kernel that does not say so itself.
template <class Params>
void launch(const Kernel<Params>& kernel, int64_t blocks, Stream stream, const Params& params,
            Start start = Start::in_order, int32_t cluster = 1) {
  if (blocks == 0) return;
  if (lists_launches()) list_launch(reinterpret_cast<const void*>(kernel.function));
#if defined(TILEWISE_EMULATOR)
  (void)stream;
  (void)start;
  emulator::run_grid(
      blocks, kernel.threads, kernel.shared_bytes, [&] { kernel.function(params); },
      kernel.cluster_size * cluster);
#else
  detail::launch(reinterpret_cast<const void*>(kernel.function), blocks, kernel.threads,
                 kernel.shared_bytes, stream, start, cluster, &params);
#endif
}

}  // namespace tilewise::cuda
