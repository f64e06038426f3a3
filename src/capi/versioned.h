// Structs that carry their size: older callers pass fewer bytes than this library knows, newer ones
// more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "capi/refusal.h"

namespace tilewise::capi {

// Sizes as first published; they never change. A struct only grows at its end.
template <class T>
inline constexpr uint32_t kFirstSize = 0;
template <>
inline constexpr uint32_t kFirstSize<tilewise_attention> = 488;
template <>
inline constexpr uint32_t kFirstSize<tilewise_mask> = 80;
template <>
inline constexpr uint32_t kFirstSize<tilewise_gradients> = 224;
template <>
inline constexpr uint32_t kFirstSize<tilewise_tangents> = 264;
template <>
inline constexpr uint32_t kFirstSize<tilewise_plan_info> = 32;  // without its texts
template <>
inline constexpr uint32_t kFirstSize<tilewise_kv_append> = 424;
template <>
inline constexpr uint32_t kFirstSize<tilewise_kernel_info> = 192;
template <>
inline constexpr uint32_t kFirstSize<tilewise_gpu_info> = 168;
template <>
inline constexpr uint32_t kFirstSize<tilewise_cuda_code_info> = 16;
template <>
inline constexpr uint32_t kFirstSize<tilewise_index_error> = 328;
template <>
inline constexpr uint32_t kFirstSize<tilewise_proof> = 40;

// A larger struct_size is certainly an uninitialised field; reading that many bytes could leave the
// caller's memory.
inline constexpr uint32_t kLargestSize = 1u << 16;

template <class T>
void check_struct_size(const T* given, const char* name) {
  static_assert(sizeof(T) >= kFirstSize<T> && kFirstSize<T> > 0);
  require(given != nullptr, name, " is NULL: a struct is needed");
  require(given->struct_size >= kFirstSize<T> && given->struct_size <= kLargestSize, name,
          ".struct_size is ", given->struct_size, ": set it to the size of the struct, ", sizeof(T),
          " in this version and never below ", kFirstSize<T>);
}

// Refuses a struct of a newer caller that uses a field that this library does not know.
template <class T>
void check_unknown_bytes(const T* given, const char* name) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < given->struct_size; ++i) {
    require(bytes[i] == 0, name, " uses an option that this version does not know: byte ", i,
            " of the struct is not 0, and only ", sizeof(T), " bytes are known");
  }
}

// A copy as large as this library's struct; fields that the caller does not know are 0.
template <class T>
T read_struct(const T* given, const char* name) {
  check_struct_size(given, name);
  const uint32_t size = given->struct_size;
  T copy{};
  std::memcpy(&copy, given, std::min<std::size_t>(size, sizeof(T)));
  check_unknown_bytes(given, name);
  copy.struct_size = sizeof(T);
  return copy;
}

// Fills the fields that the caller has room for; further fields of a newer caller keep their
// values.
template <class T>
void write_struct(const T& result, T* given) {
  const uint32_t size = given->struct_size;
  std::memcpy(given, &result, std::min<std::size_t>(size, sizeof(T)));
  given->struct_size = size;
}

}  // namespace tilewise::capi
