// Registers one function per operator and device. The schemas are defined in Python
// (python/tilewise/_ops.py), because every PyTorch from 2.10 on accepts tags there.
#include "attention.h"

namespace {

void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("forward", &tilewise::torch_binding::forward);
  library.impl("forward_max_logits", &tilewise::torch_binding::forward_max_logits);
  library.impl("backward", &tilewise::torch_binding::backward);
  library.impl("jvp", &tilewise::torch_binding::jvp);
  library.impl("second", &tilewise::torch_binding::second);
  library.impl("append_kv", &tilewise::torch_binding::append_kv);
}

// Autograd need not see these operators: tilewise._plain calls them inside an autograd function,
// which defines the derivative, or without gradients. Registering them for the autograd keys as
// well saves a pass through the dispatcher.
void register_plain(torch::stable::detail::StableLibrary& library) {
  library.impl("_plain_forward", &tilewise::torch_binding::plain_forward);
  library.impl("_plain_backward", &tilewise::torch_binding::plain_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tilewise, CPU, library) {
  register_kernels(library);
  register_plain(library);
}

// The same functions serve CUDA: the library itself rejects GPUs that it has no kernel for.
STABLE_TORCH_LIBRARY_IMPL(tilewise, CUDA, library) {
  register_kernels(library);
  register_plain(library);
}

STABLE_TORCH_LIBRARY_IMPL(tilewise, AutogradCPU, library) { register_plain(library); }
STABLE_TORCH_LIBRARY_IMPL(tilewise, AutogradCUDA, library) { register_plain(library); }
