// What a call of the C library takes from torch: threads or the stream, the current device, and
// workspace.
#ifndef TILEWISE_BINDINGS_TORCH_LAUNCH_H
#define TILEWISE_BINDINGS_TORCH_LAUNCH_H

#include <torch/csrc/stable/accelerator.h>

#include "tensor.h"

namespace tilewise::torch_binding {

// The parallel_for hook of the C ABI on torch's own threads; torch.set_num_threads sets their
// number.
tilewise_parallel torch_threads();

// Makes the device of the tensors current for a scope and provides its current stream. It does
// nothing on the CPU, and almost nothing if the GPU already is current.
class DeviceScope {
 public:
  explicit DeviceScope(const Place& place);
  void* stream() const { return stream_; }  // null on the CPU

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

// Throws an exception with the message of tilewise_last_error unless the status is TILEWISE_OK.
void check_status(tilewise_status status);

// Workspace from torch's allocator, which tracks the stream that uses it. It is at least 64-byte
// aligned on every device; 0 bytes allocate nothing.
class Workspace {
 public:
  Workspace(int64_t bytes, const Place& place);
  void* data() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }

 private:
  OptionalTensor memory_;
};

}  // namespace tilewise::torch_binding

#endif  // TILEWISE_BINDINGS_TORCH_LAUNCH_H
