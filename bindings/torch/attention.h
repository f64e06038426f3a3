// The arguments of the operators, in the order of their schemas (python/tilewise/_ops.py), and the
// C structs made of them.
#ifndef TILEWISE_BINDINGS_TORCH_ATTENTION_H
#define TILEWISE_BINDINGS_TORCH_ATTENTION_H

#include "tensor.h"

namespace tilewise::torch_binding {

// Takes arguments off the stack of a boxed kernel, one by one; tensors become owned.
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

// What forward and backward share after the tensors: members in the order of the schema.
struct Options {
  explicit Options(Arguments& arguments);
  OptionalTensor bias, alibi_slopes, sinks;
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  OptionalTensor block_table, kv_batch_idx, leftpad_k;
  OptionalTensor scale_tensor, dropout_state;
  double scale;
  int64_t window_left, window_right;
  double softcap, dropout_p;
  int64_t max_seqlen_q, max_seqlen_k, num_splits;
  bool deterministic, tf32, check, heads_first;
};

// The problem in the words of the C ABI; `out` and `lse` are filled in by the caller.
struct Problem {
  tilewise_attention attention{};
  Place place;
  int32_t torch_dtype = 0;

  bool varlen_q() const { return attention.cu_seqlens_q != nullptr; }
  int64_t keys() const;  // of a row of dk: those of k, or of a whole row of the block table
};
// Device and dtype: what the library knows of a problem from q alone.
Problem new_problem(const Tensor& q);
Problem describe(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options);
void set_output(Problem& problem, const Tensor& out, const Tensor& lse);

// Which gradients are asked for: the bits of the operators' argument `wanted`.
enum Wanted : int64_t {
  want_q = 1,
  want_k = 2,
  want_v = 4,
  want_bias = 8,
  want_sinks = 16,
  want_scale = 32
};

// Plan, workspace, launch; on torch's threads or on the current stream of the problem's device.
void run_forward(Problem& problem);
void run_backward(Problem& problem, const tilewise_gradients& gradients);

// The results of a boxed kernel, in the order of its schema.
template <typename... T>
void put(StableIValue* stack, const T&... results) {
  size_t i = 0;
  ((stack[i++] = torch::stable::detail::from(results)), ...);
}

// Boxed kernels, registered in register.cpp.
void forward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void backward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void plain_forward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void plain_backward(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void append_kv(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace tilewise::torch_binding

#endif  // TILEWISE_BINDINGS_TORCH_ATTENTION_H
