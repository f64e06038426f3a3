// From a filled C struct to a call on the tensors' device: torch's threads or torch's stream.
#ifndef TILEWISE_BINDINGS_TORCH_LAUNCH_H
#define TILEWISE_BINDINGS_TORCH_LAUNCH_H

#include <torch/csrc/stable/accelerator.h>

#include "tensor.h"

namespace tilewise::torch_binding {

// The hook of the C ABI over torch's own threads: torch.set_num_threads governs.
tilewise_parallel torch_threads();

// Makes the device of the tensors current for a scope, and knows its current stream. Nothing to do
// on the CPU, and next to nothing on the GPU that is current already.
class DeviceScope {
 public:
  explicit DeviceScope(const Place& place);
  void* stream() const { return stream_; }  // null on the CPU

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

// Raises with the sentence of tilewise_last_error.
void check_status(tilewise_status status);

// Workspace from torch's allocator, which knows the stream it is used on: at least 64-byte aligned
// on every device. Of no bytes there is none.
class Workspace {
 public:
  Workspace(int64_t bytes, const Place& place);
  void* data() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }

 private:
  OptionalTensor memory_;
};

}  // namespace tilewise::torch_binding

#endif  // TILEWISE_BINDINGS_TORCH_LAUNCH_H
