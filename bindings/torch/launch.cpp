#include "launch.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <atomic>

namespace tilewise::torch_binding {
namespace {

struct Loop {
  std::atomic<int64_t> next{0};
  int64_t tasks;
  tilewise_task task;
  void* context;
};

// torch divides a range into one contiguous part per thread beforehand. Attention tasks differ in
// length (causal), so torch gets a range of workers, and each worker takes the next task until none
// is left.
void parallel_for(void* user, int64_t tasks, tilewise_task task, void* context) {
  const auto threads = static_cast<int64_t>(reinterpret_cast<intptr_t>(user));
  const int64_t workers = tasks < threads ? tasks : threads;
  if (workers <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(context, i);
    return;
  }
  Loop loop{.tasks = tasks, .task = task, .context = context};
  const auto work = [](int64_t, int64_t, void* state) {
    Loop& shared = *static_cast<Loop*>(state);
    for (int64_t i = shared.next.fetch_add(1, std::memory_order_relaxed); i < shared.tasks;
         i = shared.next.fetch_add(1, std::memory_order_relaxed))
      shared.task(shared.context, i);
  };
  // A failure can only occur before any task has run, because tasks do not throw.
  if (torch_parallel_for(0, workers, 1, work, &loop) != AOTI_TORCH_SUCCESS) work(0, 1, &loop);
}

// The function that returns the stream is in libtorch_cuda, which a CPU-only torch lacks. It is
// looked up in the already loaded library, so the adapter neither links to that nor loads it.
void* current_cuda_stream(int32_t device_index) {
  using Accessor = AOTITorchError (*)(int32_t, void**);
  static const Accessor accessor = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Accessor>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (accessor == nullptr)
    throw std::runtime_error(
        "tilewise: the tensors are on a CUDA device, but this PyTorch has no CUDA library");
  void* stream = nullptr;
  check_shim(accessor(device_index, &stream), "aoti_torch_get_current_cuda_stream");
  return stream;
}

}  // namespace

tilewise_parallel torch_threads() {
  uint32_t threads = 1;
  check_shim(torch_get_num_threads(&threads), "torch_get_num_threads");
  tilewise_parallel parallel{};
  parallel.parallel_for = parallel_for;
  parallel.user = reinterpret_cast<void*>(static_cast<intptr_t>(threads));
  parallel.threads = static_cast<int32_t>(threads);
  return parallel;
}

DeviceScope::DeviceScope(const Place& place) {
  if (place.device_type != aoti_torch_device_type_cuda()) return;
  if (torch::stable::accelerator::getCurrentDeviceIndex() != place.device_index)
    guard_.emplace(place.device_index);
  stream_ = current_cuda_stream(place.device_index);
}

void check_status(tilewise_status status) {
  if (status == TILEWISE_OK) return;
  if (status == TILEWISE_INVALID_ARGUMENT) invalid(tilewise_last_error());
  throw std::runtime_error(std::string("tilewise: ") + tilewise_last_error());
}

Workspace::Workspace(int64_t bytes, const Place& place) {
  if (bytes > 0) memory_ = new_tensor({bytes}, aoti_torch_dtype_uint8(), place);
}

}  // namespace tilewise::torch_binding
