// The arguments of the operators, in the order of their schemas (python/tilewise/_ops.py), and the
// C structs made of them.
#ifndef TILEWISE_BINDINGS_TORCH_ATTENTION_H
#define TILEWISE_BINDINGS_TORCH_ATTENTION_H

#include <memory>

#include "tensor.h"

namespace tilewise::torch_binding {

// Takes the arguments of a boxed kernel off the stack, one by one, and takes ownership of tensors.
class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count) : stack_(stack), count_(count) {}
  Tensor tensor() { return torch::stable::detail::to<Tensor>(next()); }
  OptionalTensor optional_tensor() { return torch::stable::detail::to<OptionalTensor>(next()); }
  double real() { return torch::stable::detail::to<double>(next()); }
  std::optional<double> optional_real() {
    return torch::stable::detail::to<std::optional<double>>(next());
  }
  int64_t integer() { return torch::stable::detail::to<int64_t>(next()); }
  bool flag() { return torch::stable::detail::to<bool>(next()); }

 private:
  StableIValue next() {
    if (position_ == count_)
      throw std::runtime_error(
          "tilewise: the operator got fewer arguments than its kernel reads; "
          "the Python files and libtilewise_torch.so differ in version");
    return stack_[position_++];
  }
  StableIValue* stack_;
  uint64_t count_;
  uint64_t position_ = 0;
};

// The options of a problem, which forward, backward, jvp and second share; members in the order of
// the schemas.
struct Options {
  explicit Options(Arguments& arguments);
  OptionalTensor bias, alibi_slopes, sinks;
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  OptionalTensor block_table, kv_batch_idx, leftpad_k, q_descale, k_descale, v_descale;
  OptionalTensor scale_tensor, dropout_state, diagonal;
  OptionalTensor mask_first, mask_entries, mask_bits;
  double scale;
  int64_t window_left, window_right;
  double softcap, dropout_p;
  int64_t max_seqlen_q, max_seqlen_k, num_splits;
  bool deterministic, tf32, check, batch_invariant;
  int64_t row_offset, key_offset, batch_offset, head_offset, heads_q_total;
  int64_t mask_heads, mask_rows, mask_keys;
  int64_t out_dtype;
  bool heads_first;
};

// A problem as the C ABI describes it; the caller fills in `out` and `lse`.
struct Problem {
  tilewise_attention attention{};
  std::unique_ptr<tilewise_mask> mask;  // that attention.mask points to
  Place place;
  int32_t torch_dtype = 0;  // of q
  int32_t out_dtype = 0;    // of out, as torch numbers dtypes

  bool varlen_q() const { return attention.cu_seqlens_q != nullptr; }
  int64_t keys() const;  // rows of dk: those of k, or the capacity of a row of the block table
};
// Sets device and dtype, which q alone determines.
Problem new_problem(const Tensor& q);
Problem describe(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options);

// The scale factors [batch, heads_kv] of a float8_e4m3fn tensor, if they are given.
struct Descale {
  const float* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0;
};
Descale descale_of(const OptionalTensor& given, const char* name, int64_t batch, int64_t heads_kv,
                   const Place& place);
// Sets those of a cache in a struct that has them.
template <class Struct>
void set_descale(Struct& c, const OptionalTensor& k, const OptionalTensor& v, const Place& place) {
  const Descale of_k = descale_of(k, "k_descale", c.batch, c.heads_kv, place);
  c.k_descale = of_k.data;
  c.k_descale_stride_batch = of_k.stride_batch;
  c.k_descale_stride_head = of_k.stride_head;
  const Descale of_v = descale_of(v, "v_descale", c.batch, c.heads_kv, place);
  c.v_descale = of_v.data;
  c.v_descale_stride_batch = of_v.stride_batch;
  c.v_descale_stride_head = of_v.stride_head;
}

// A new lse for a described problem: [B, Hq, Sq] or, if q is packed, [Hq, T]. With lse_low it is
// [2, B, Hq, Sq] or [2, Hq, T], so that one tensor carries both from the forward to the backward.
Tensor new_lse(const Problem& problem, bool with_lse_low);
void set_lse(Problem& problem, const Tensor& lse);  // with or without lse_low

// A tensor with the shape of lse without lse_low: a gradient or a tangent of lse.
struct LseView {
  float* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0;
};
LseView lse_view(const Problem& problem, const OptionalTensor& lse, const char* name);
// Sets the incoming gradient of lse; lse_low has none.
void set_dlse(tilewise_gradients& g, const Problem& problem, const OptionalTensor& dlse);

// Which gradients are wanted: the bits of the operators' argument `wanted`.
enum Wanted : int64_t {
  want_q = 1,
  want_k = 2,
  want_v = 4,
  want_bias = 8,
  want_sinks = 16,
  want_scale = 32
};

// The results of backward and second: gradients that are not wanted are empty tensors, and null
// pointers in the C struct.
struct GradientTensors {
  Tensor dq, dk, dv, dbias, dsinks, dscale;
};
GradientTensors new_gradients(tilewise_gradients& g, const Problem& problem, const Options& options,
                              const Tensor& k, const Tensor& v, int64_t wanted);

// Checks the device, dtype and shape of out or its tangent, and of a gradient of one of them, which
// has the dtype of q.
void expect_out(const Tensor& out, const char* name, const Problem& problem);
void expect_dout(const Tensor& dout, const char* name, const Problem& problem);
Tensor new_out(const Problem& problem, const Options& options);

// Plan, allocate the workspace and launch, on torch's threads or on the current stream of the
// device.
void run_forward(Problem& problem);
void run_backward(Problem& problem, const tilewise_gradients& gradients);
void run_jvp(Problem& problem, const tilewise_tangents& tangents);
void run_second(Problem& problem, const tilewise_tangents& tangents,
                const tilewise_gradients& gradients);

// Puts the results of a boxed kernel on the stack, in the order of its schema.
template <typename... T>
void put(StableIValue* stack, const T&... results) {
  size_t i = 0;
  ((stack[i++] = torch::stable::detail::from(results)), ...);
}

// Boxed kernels, registered in register.cpp.
void forward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void forward_max_logits(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void backward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void jvp(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void second(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void plain_forward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void plain_backward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void append_kv(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace tilewise::torch_binding

#endif  // TILEWISE_BINDINGS_TORCH_ATTENTION_H
