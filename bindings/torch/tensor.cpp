#include "tensor.h"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace tilewise::torch_binding {
namespace {

std::string shape_text(const int64_t* shape, int64_t rank) {
  std::string text = "[";
  for (int64_t i = 0; i < rank; ++i) {
    if (i != 0) text += ", ";
    text += shape[i] == any_size ? std::string("any") : std::to_string(shape[i]);
  }
  return text + "]";
}

std::string place_text(const Place& place) {
  if (place.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (place.device_type == aoti_torch_device_type_cuda())
    return "cuda:" + std::to_string(place.device_index);
  return "device type " + std::to_string(place.device_type);
}

const void* dense_vector(const Tensor& tensor, const char* name, int64_t size, const Place& place) {
  expect_place(tensor, name, place);
  expect_shape(tensor, name, {size});
  if (size > 1 && tensor.stride(0) != 1)
    invalid(std::string(name) + " has stride " + std::to_string(tensor.stride(0)) +
            ", but must be contiguous");
  return address_of(tensor);
}

Tensor new_strided(const int64_t* shape, const int64_t* strides, int64_t rank, int32_t dtype,
                   const Place& place) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(rank, shape, strides, dtype, place.device_type,
                                      place.device_index, &handle),
             "aoti_torch_empty_strided");
  return Tensor(handle);
}

}  // namespace

void invalid(const std::string& sentence) { throw std::invalid_argument("tilewise: " + sentence); }

void check_shim(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("tilewise: PyTorch's ") + what + " failed");
}

Place place_of(const Tensor& tensor) {
  Place place;
  check_shim(aoti_torch_get_device_type(tensor.get(), &place.device_type),
             "aoti_torch_get_device_type");
  place.device_index = tensor.get_device_index();
  return place;
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  check_shim(aoti_torch_get_dtype(tensor.get(), &dtype), "aoti_torch_get_dtype");
  return dtype;
}

std::string dtype_text(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_bool(), "bool"},
  };
  for (const auto& [number, name] : names)
    if (number == dtype) return name;
  return "number " + std::to_string(dtype) + " of c10::ScalarType";
}

tilewise_dtype element_type(const Tensor& tensor, const char* name) {
  const int32_t dtype = dtype_of(tensor);
  if (dtype == aoti_torch_dtype_float32()) return TILEWISE_FLOAT32;
  if (dtype == aoti_torch_dtype_float16()) return TILEWISE_FLOAT16;
  if (dtype == aoti_torch_dtype_bfloat16()) return TILEWISE_BFLOAT16;
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return TILEWISE_FLOAT8_E4M3;
  invalid(std::string(name) + " has dtype " + dtype_text(dtype) +
          ", but must be float32, float16, bfloat16 or float8_e4m3fn");
}

void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  const auto sizes = tensor.sizes();
  const auto rank = static_cast<int64_t>(shape.size());
  bool same = static_cast<int64_t>(sizes.size()) == rank;
  for (int64_t i = 0; same && i < rank; ++i) {
    const int64_t want = shape.begin()[i];
    same = want == any_size || want == sizes[static_cast<size_t>(i)];
  }
  if (same) return;
  invalid(std::string(name) + " has shape " +
          shape_text(sizes.data(), static_cast<int64_t>(sizes.size())) + ", but must be " +
          shape_text(shape.begin(), rank));
}

void expect_dtype(const Tensor& tensor, const char* name, int32_t dtype, const char* allowed) {
  if (dtype_of(tensor) != dtype)
    invalid(std::string(name) + " has dtype " + dtype_text(dtype_of(tensor)) + ", but must be " +
            allowed);
}

void expect_place(const Tensor& tensor, const char* name, const Place& place) {
  const Place given = place_of(tensor);
  if (!(given == place))
    invalid(std::string(name) + " is on " + place_text(given) + ", but must be on " +
            place_text(place) + " like the other tensors");
}

void expect_both(const OptionalTensor& first, const char* first_name, const OptionalTensor& second,
                 const char* second_name) {
  if (first.has_value() == second.has_value()) return;
  const char* given = first ? first_name : second_name;
  const char* missing = first ? second_name : first_name;
  invalid(std::string(given) + " is given and " + missing + " is not: give both or neither");
}

void expect_contiguous_columns(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  // torch considers tensors without elements contiguous, whatever their strides.
  if (tensor.size(last) > 1 && tensor.stride(last) != 1 && tensor.numel() != 0)
    invalid(std::string(name) + " has a last dimension of stride " +
            std::to_string(tensor.stride(last)) + ", but it must be contiguous (stride 1)");
}

int64_t stride_of(const Tensor& tensor, int64_t dim) {
  return tensor.size(dim) <= 1 ? 0 : tensor.stride(dim);
}

const void* address_of(const Tensor& tensor) {
  alignas(64) static constexpr std::array<std::byte, 64> kNoElements{};
  return tensor.numel() == 0 ? kNoElements.data() : tensor.const_data_ptr();
}

tilewise_tensor view_of(const Tensor& tensor, const char* name) {
  expect_contiguous_columns(tensor, name);
  tilewise_tensor view{};
  view.data = const_cast<void*>(tensor.const_data_ptr());
  const bool batched = tensor.dim() == 4;
  view.stride_batch = batched ? tensor.stride(0) : 0;
  view.stride_row = tensor.stride(batched ? 1 : 0);
  view.stride_head = tensor.stride(batched ? 2 : 1);
  return view;
}

const int32_t* int32_vector(const OptionalTensor& tensor, const char* name, int64_t size,
                            const Place& place) {
  if (!tensor) return nullptr;
  expect_dtype(*tensor, name, aoti_torch_dtype_int32(), "int32");
  return static_cast<const int32_t*>(dense_vector(*tensor, name, size, place));
}

const float* float_vector(const OptionalTensor& tensor, const char* name, int64_t size,
                          const Place& place) {
  if (!tensor) return nullptr;
  expect_dtype(*tensor, name, aoti_torch_dtype_float32(), "float32");
  return static_cast<const float*>(dense_vector(*tensor, name, size, place));
}

Tensor new_tensor(std::initializer_list<int64_t> shape, int32_t dtype, const Place& place) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (auto i = static_cast<int64_t>(shape.size()) - 1; i >= 0; --i) {
    strides[static_cast<size_t>(i)] = stride;
    stride *= shape.begin()[i] > 0 ? shape.begin()[i] : 1;
  }
  return new_strided(shape.begin(), strides.data(), static_cast<int64_t>(shape.size()), dtype,
                     place);
}

Tensor new_rows(std::initializer_list<int64_t> shape, int32_t dtype, const Place& place,
                bool heads_first) {
  if (!heads_first || shape.size() != 4) return new_tensor(shape, dtype, place);
  const int64_t* n = shape.begin();
  const auto at_least_one = [](int64_t size) { return size > 0 ? size : 1; };
  const int64_t row = at_least_one(n[3]);
  const int64_t head = row * at_least_one(n[1]);
  const int64_t batch = head * at_least_one(n[2]);
  const std::array<int64_t, 4> strides{batch, row, head, 1};
  return new_strided(n, strides.data(), 4, dtype, place);
}

}  // namespace tilewise::torch_binding
