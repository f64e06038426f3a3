// A small valid problem with all its memory, and outputs that show whether they were written.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tilewise/tilewise.h"

namespace capi_test {

// Bytes that no kernel writes by chance; as a float they are a NaN with a payload.
inline constexpr unsigned char kPoison = 0xfe;

// Poisoned floats that detect writes. One element more than requested lets a test misalign a
// pointer.
class Output {
 public:
  explicit Output(std::size_t floats) : values_(floats + 1) { poison(); }
  float* data() { return values_.data(); }
  const float* data() const { return values_.data(); }
  std::size_t size() const { return values_.size() - 1; }
  float operator[](std::size_t i) const { return values_[i]; }
  void poison() { std::memset(values_.data(), kPoison, values_.size() * sizeof(float)); }
  bool untouched() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values_.data());
    for (std::size_t i = 0; i < values_.size() * sizeof(float); ++i)
      if (bytes[i] != kPoison) return false;
    return true;
  }

 private:
  std::vector<float> values_;
};

inline std::vector<float> pattern(std::size_t floats, float phase) {
  std::vector<float> values(floats + 1);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(phase + 0.37f * static_cast<float>(i));
  return values;
}

// 64-byte aligned memory, poisoned.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : bytes_(bytes), memory_(new unsigned char[bytes + 64]) {
    std::memset(memory_.get(), kPoison, bytes + 64);
  }
  unsigned char* data() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    return memory_.get() + (64 - address % 64) % 64;
  }
  int64_t size() const { return static_cast<int64_t>(bytes_); }
  bool untouched() const {
    for (std::size_t i = 0; i < bytes_ + 64; ++i)
      if (memory_[i] != kPoison) return false;
    return true;
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<unsigned char[]> memory_;
};

// Dense attention in fp32: 2 sequences of 5 rows and 7 keys, 4 query heads that share 2 key/value
// heads, D = 8, Dv = 6. The index arrays are valid for it; the functions below switch them on.
struct Call {
  static constexpr int64_t B = 2, Sq = 5, Sk = 7, Hq = 4, Hkv = 2, D = 8, Dv = 6;
  static constexpr int64_t kPageSize = 3, kPages = 6, kWidth = 3;

  std::vector<float> q = pattern(B * Sq * Hq * D, 0.1f);
  std::vector<float> k = pattern(kPages * kPageSize * Hkv * D, 0.2f);
  std::vector<float> v = pattern(kPages * kPageSize * Hkv * Dv, 0.3f);
  std::vector<float> dout = pattern(B * Sq * Hq * Dv, 0.4f);
  std::vector<float> bias = pattern(B * Hq * Sq * 9, 0.5f);
  std::vector<float> slopes = pattern(B * Hq, 0.6f);
  std::vector<float> sinks = pattern(Hq, 0.7f);
  std::vector<float> descales = pattern(B * Hkv, 0.9f);
  std::vector<float> dlse_values = pattern(B * Hq * Sq, 0.8f);
  float scale = 0.25f;
  uint64_t dropout_state[2] = {7, 9};
  std::vector<int32_t> cu_q = {0, 2, 5}, cu_k = {0, 3, 7};
  std::vector<int32_t> used_q = {1, 2}, used_k = {2, 3};
  std::vector<int32_t> table = {0, 2, 4, 1, 3, 5};
  std::vector<int32_t> batch_idx = {1, 0}, leftpad = {1, 0};
  tilewise_parallel parallel{};

  Output out{B * Sq * Hq * Dv}, lse{B * Hq * Sq}, lse_low{B * Hq * Sq};
  Output dq{B * Sq * Hq * D}, dk{B * kWidth * kPageSize * Hkv * D};
  Output dv{B * kWidth * kPageSize * Hkv * Dv}, dbias{B * Hq * Sq * 9}, dsinks{Hq}, dscale{1};
  Scratch workspace{1 << 20};
  int64_t workspace_bytes = 1 << 20;
  void* workspace_data = workspace.data();
  bool give_gradients = true;

  tilewise_attention a{};
  tilewise_gradients g{};

  Call() {
    a.struct_size = sizeof(a);
    a.batch = B;
    a.seqlen_q = Sq;
    a.seqlen_k = Sk;
    a.heads_q = Hq;
    a.heads_kv = Hkv;
    a.head_dim = D;
    a.head_dim_v = Dv;
    a.q = {q.data(), Sq * Hq * D, Hq * D, D};
    a.k = {k.data(), Sk * Hkv * D, Hkv * D, D};
    a.v = {v.data(), Sk * Hkv * Dv, Hkv * Dv, Dv};
    a.out = {out.data(), Sq * Hq * Dv, Hq * Dv, Dv};
    a.lse = lse.data();
    a.lse_stride_batch = Hq * Sq;
    a.lse_stride_head = Sq;
    a.window_left = a.window_right = -1;
    a.scale = scale;
    g.struct_size = sizeof(g);
    g.dout = {dout.data(), Sq * Hq * Dv, Hq * Dv, Dv};
    g.dq = {dq.data(), Sq * Hq * D, Hq * D, D};
    g.dk = {dk.data(), Sk * Hkv * D, Hkv * D, D};
    g.dv = {dv.data(), Sk * Hkv * Dv, Hkv * Dv, Dv};
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void use_varlen_q() {
    a.cu_seqlens_q = cu_q.data();
    a.lse_stride_head = Sq;
  }
  void use_varlen_k() { a.cu_seqlens_k = cu_k.data(); }
  void use_pages() {
    a.block_table = table.data();
    a.block_table_stride = a.block_table_width = kWidth;
    a.page_size = kPageSize;
    a.pages = kPages;
    a.k = {k.data(), kPageSize * Hkv * D, Hkv * D, D};
    a.v = {v.data(), kPageSize * Hkv * Dv, Hkv * Dv, Dv};
    g.dk.stride_batch = kWidth * kPageSize * Hkv * D;
    g.dv.stride_batch = kWidth * kPageSize * Hkv * Dv;
  }
  void use_bias() {
    a.bias = bias.data();
    a.bias_stride_batch = Hq * Sq * 9;
    a.bias_stride_head = Sq * 9;
    a.bias_stride_row = 9;
    g.dbias = dbias.data();
    g.dbias_stride_batch = Hq * Sq * 9;
    g.dbias_stride_head = Sq * 9;
    g.dbias_stride_row = 9;
    g.dbias_keys = 7;
    g.dbias_rows = Sq;
  }
  void use_sinks() {
    a.sinks = sinks.data();
    g.dsinks = dsinks.data();
  }
  void use_float8() {
    a.dtype = TILEWISE_FLOAT16;
    a.kv_float8 = 1;
    a.k_descale = a.v_descale = descales.data();
    a.k_descale_stride_batch = a.v_descale_stride_batch = Hkv;
    a.k_descale_stride_head = a.v_descale_stride_head = 1;
  }
  void use_dlse() {
    g.dlse = dlse_values.data();
    g.dlse_stride_batch = Hq * Sq;
    g.dlse_stride_head = Sq;
  }

  tilewise_status plan(int32_t pass, tilewise_plan_info* info) const {
    const bool backward = pass == TILEWISE_PASS_BACKWARD;
    return tilewise_plan(&a, backward && give_gradients ? &g : nullptr, pass, info);
  }
  tilewise_status forward() { return tilewise_forward(&a, workspace_data, workspace_bytes); }
  tilewise_status backward() {
    return tilewise_backward(&a, give_gradients ? &g : nullptr, workspace_data, workspace_bytes);
  }

  bool untouched() const {
    return out.untouched() && lse.untouched() && lse_low.untouched() && dq.untouched() &&
           dk.untouched() && dv.untouched() && dbias.untouched() && dsinks.untouched() &&
           dscale.untouched() && workspace.untouched();
  }
};

// A pointer that is off by some bytes, as after a careless cast.
template <class T>
T* misaligned(T* pointer, std::size_t bytes = 1) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + bytes);
}

// The message is one sentence: it has no line break, and it contains what is expected.
inline void expect_message(const std::string& expected) {
  const std::string message = tilewise_last_error();
  EXPECT_NE(message.find(expected), std::string::npos)
      << "message:  " << message << "\nexpected: " << expected;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

// A way to make a call invalid, and what the message must then contain.
template <class Target>
struct BadInput {
  const char* name;
  void (*corrupt)(Target&);
  const char* message;
};

template <class Target>
std::string bad_input_name(const testing::TestParamInfo<BadInput<Target>>& info) {
  return info.param.name;
}

// Without this GoogleTest prints the bytes of the struct, which differ from run to run.
template <class Target>
void PrintTo(const BadInput<Target>& bad, std::ostream* stream) {
  *stream << bad.name;
}

// Whether there is a GPU (or the emulator): then host memory must not be passed as GPU memory.
inline bool has_gpu() {
  tilewise_kernel_info info{};
  info.struct_size = sizeof(info);
  for (int32_t i = 0; tilewise_kernel(i, &info) == TILEWISE_OK; ++i) {
    if (info.device == TILEWISE_CUDA && info.available != 0) return true;
  }
  return false;
}

}  // namespace capi_test
