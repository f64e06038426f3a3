// Torch tensors as the C ABI sees them: checked views, and new tensors.
//
// Only what the stable ABI of PyTorch 2.10 offers is used, so that one binary serves every later
// release. Nothing here knows a kernel.
#ifndef TILEWISE_BINDINGS_TORCH_TENSOR_H
#define TILEWISE_BINDINGS_TORCH_TENSOR_H

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cfenv>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "tilewise/tilewise.h"

namespace tilewise::torch_binding {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// std::invalid_argument reaches Python as ValueError, std::runtime_error as RuntimeError.
[[noreturn]] void invalid(const std::string& sentence);

// Numbers arrive as double and become float rounded to nearest, whatever the caller has set.
class RoundToNearest {
 public:
  RoundToNearest() : found_(std::fegetround()) {
    if (found_ != FE_TONEAREST) std::fesetround(FE_TONEAREST);
  }
  ~RoundToNearest() {
    if (found_ != FE_TONEAREST) std::fesetround(found_);
  }
  RoundToNearest(const RoundToNearest&) = delete;
  RoundToNearest& operator=(const RoundToNearest&) = delete;

 private:
  int found_;
};

// A failed call of a shim: the message says which one.
void check_shim(AOTITorchError error, const char* what);

struct Place {
  int32_t device_type = 0;
  int32_t device_index = 0;
  bool operator==(const Place&) const = default;
};
Place place_of(const Tensor& tensor);
int32_t dtype_of(const Tensor& tensor);

// The library's dtype of a torch dtype; the name is that of the argument asked about.
tilewise_dtype element_type(const Tensor& tensor, const char* name);

constexpr int64_t any_size = -1;

// Shape, e.g. shape_is(k, "k", {batch, any_size, heads, dim}); raises with both shapes.
void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape);
void expect_dtype(const Tensor& tensor, const char* name, int32_t dtype, const char* allowed);
void expect_place(const Tensor& tensor, const char* name, const Place& place);
void expect_contiguous_columns(const Tensor& tensor, const char* name);

// 0 for a dimension of one element: its stride is arbitrary in torch, and nothing steps along it.
int64_t stride_of(const Tensor& tensor, int64_t dim);

// View of [batch, row, head, column] or, when the tensor has three dimensions, [row, head, column].
tilewise_tensor view_of(const Tensor& tensor, const char* name);

// Dense int32, fp32... vectors: the pointer, or null. Checks dtype, place, shape and density.
const int32_t* int32_vector(const OptionalTensor& tensor, const char* name, int64_t size,
                            const Place& place);
const float* float_vector(const OptionalTensor& tensor, const char* name, int64_t size,
                          const Place& place);

// New tensors. `heads_first` stores [batch, row, head, column] as [batch, head, row, column].
Tensor new_tensor(std::initializer_list<int64_t> shape, int32_t dtype, const Place& place);
Tensor new_rows(std::initializer_list<int64_t> shape, int32_t dtype, const Place& place,
                bool heads_first);

}  // namespace tilewise::torch_binding

#endif  // TILEWISE_BINDINGS_TORCH_TENSOR_H
