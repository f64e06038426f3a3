// Torch tensors as the C ABI needs them: checked views, and new tensors.
//
// Only the stable ABI of PyTorch 2.10 is used, so that one binary works with every later release.
// This file is independent of the operators.
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

// While it exists, floating-point conversions round to nearest, whatever the caller has set:
// numbers arrive as double and become float.
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

// Throws if a call of a PyTorch shim failed; the message names it.
void check_shim(AOTITorchError error, const char* what);

struct Place {
  int32_t device_type = 0;
  int32_t device_index = 0;
  bool operator==(const Place&) const = default;
};
Place place_of(const Tensor& tensor);
int32_t dtype_of(const Tensor& tensor);
// The name of a torch dtype, for error messages.
std::string dtype_text(int32_t dtype);

// The library's dtype for a torch dtype; `name` is the argument, for the error message.
tilewise_dtype element_type(const Tensor& tensor, const char* name);

constexpr int64_t any_size = -1;

// Checks the shape, e.g. expect_shape(k, "k", {batch, any_size, heads, dim}); throws with both
// shapes.
void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape);
void expect_dtype(const Tensor& tensor, const char* name, int32_t dtype, const char* allowed);
// Throws unless the tensor is on the device of the other tensors.
void expect_place(const Tensor& tensor, const char* name, const Place& place);
void expect_contiguous_columns(const Tensor& tensor, const char* name);
// Throws if one of two arguments is given without the other.
void expect_both(const OptionalTensor& first, const char* first_name, const OptionalTensor& second,
                 const char* second_name);

// The stride, or 0 for a dimension of one element, whose stride is arbitrary in torch and never
// used.
int64_t stride_of(const Tensor& tensor, int64_t dim);

// The address of an optional argument that is given. torch gives a tensor without elements a null
// pointer, which would tell the C ABI that the argument is not given: it gets an address that
// nothing reads.
const void* address_of(const Tensor& tensor);

// The view of a tensor [batch, row, head, column] or, with three dimensions, [row, head, column].
tilewise_tensor view_of(const Tensor& tensor, const char* name);

// The address of a contiguous vector, or null if it is not given. Checks its device, dtype, shape
// and contiguity.
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
