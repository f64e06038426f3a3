// The implementations of the operators forward, forward_max_logits and backward: they fill C
// structs from torch tensors, launch, and return torch tensors.
#include "attention.h"
#include "launch.h"

namespace tilewise::torch_binding {
namespace {

Tensor new_key_gradient(const Problem& problem, const Tensor& like, const Options& options) {
  const tilewise_attention& a = problem.attention;
  const int64_t columns = like.size(like.dim() - 1);
  if (a.cu_seqlens_k != nullptr)
    return new_tensor({a.seqlen_k, a.heads_kv, columns}, problem.torch_dtype, problem.place);
  // With a block table, one row per key of each sequence; otherwise, one per row of the cache.
  const int64_t batch = a.block_table != nullptr ? a.batch : like.size(0);
  return new_rows({batch, problem.keys(), a.heads_kv, columns}, problem.torch_dtype, problem.place,
                  options.heads_first);
}

void set_rows(tilewise_tensor& view, Tensor& tensor, const char* name, Tensor made) {
  tensor = std::move(made);
  view = view_of(tensor, name);
}

void allocate_dbias(tilewise_gradients& g, Tensor& dbias, const Problem& problem,
                    const Tensor& bias) {
  for (int64_t i = 0; i < 3; ++i)
    if (bias.size(i) > 1 && bias.stride(i) == 0)
      invalid("bias has stride 0 in dimension " + std::to_string(i) +
              ", but its gradient is requested: give it size 1 in that dimension, or make it "
              "contiguous");
  dbias = new_tensor({bias.size(0), bias.size(1), bias.size(2), bias.size(3)},
                     aoti_torch_dtype_float32(), problem.place);
  g.dbias = static_cast<float*>(dbias.mutable_data_ptr());
  g.dbias_stride_batch = stride_of(dbias, 0);
  g.dbias_stride_head = stride_of(dbias, 1);
  g.dbias_stride_row = stride_of(dbias, 2);
  g.dbias_rows = bias.size(2);
  g.dbias_keys = bias.size(3);
}

Tensor new_float(std::initializer_list<int64_t> shape, const Problem& problem, float*& data) {
  Tensor tensor = new_tensor(shape, aoti_torch_dtype_float32(), problem.place);
  data = static_cast<float*>(tensor.mutable_data_ptr());
  return tensor;
}

// Checks the device and shape of a tensor with the shape of out.
void expect_rows(const Tensor& rows, const char* name, const Problem& problem) {
  const tilewise_attention& a = problem.attention;
  expect_place(rows, name, problem.place);
  if (problem.varlen_q())
    expect_shape(rows, name, {a.seqlen_q, a.heads_q, a.head_dim_v});
  else
    expect_shape(rows, name, {a.batch, a.seqlen_q, a.heads_q, a.head_dim_v});
}

void set_incoming(tilewise_gradients& g, const Problem& problem, const Tensor& dout,
                  const OptionalTensor& dlse) {
  expect_dout(dout, "dout", problem);
  g.dout = view_of(dout, "dout");
  set_dlse(g, problem, dlse);
}

// While it exists, the device of the problem is current, and the problem uses torch's current
// stream or, on the CPU, torch's threads.
class Launch {
 public:
  explicit Launch(Problem& problem) : device_(problem.place) {
    problem.attention.stream = device_.stream();
    if (problem.attention.device == TILEWISE_CUDA) return;
    threads_ = torch_threads();
    problem.attention.parallel = &threads_;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

 private:
  DeviceScope device_;
  tilewise_parallel threads_{};
};

// An empty plan without the texts, which would take time in every call.
tilewise_plan_info new_plan() {
  tilewise_plan_info plan{};
  plan.struct_size = offsetof(tilewise_plan_info, kernel);
  return plan;
}

int64_t workspace_of(const Problem& problem, const tilewise_gradients* gradients) {
  tilewise_plan_info plan = new_plan();
  check_status(tilewise_plan(&problem.attention, gradients,
                             gradients == nullptr ? TILEWISE_PASS_FORWARD : TILEWISE_PASS_BACKWARD,
                             &plan));
  return plan.workspace_bytes;
}

int64_t workspace_of(const Problem& problem, const tilewise_tangents& tangents,
                     const tilewise_gradients* gradients) {
  tilewise_plan_info plan = new_plan();
  check_status(tilewise_plan_tangents(
      &problem.attention, &tangents, gradients,
      gradients == nullptr ? TILEWISE_PASS_JVP : TILEWISE_PASS_SECOND, &plan));
  return plan.workspace_bytes;
}

}  // namespace

GradientTensors new_gradients(tilewise_gradients& g, const Problem& problem, const Options& options,
                              const Tensor& k, const Tensor& v, int64_t wanted) {
  const tilewise_attention& a = problem.attention;
  const auto none = [&] { return new_tensor({0}, aoti_torch_dtype_float32(), problem.place); };
  GradientTensors tensors{none(), none(), none(), none(),
                          none(), none()};  // separate tensors, because results may not alias
  if ((wanted & want_q) != 0) {
    Tensor dq =
        problem.varlen_q()
            ? new_tensor({a.seqlen_q, a.heads_q, a.head_dim}, problem.torch_dtype, problem.place)
            : new_rows({a.batch, a.seqlen_q, a.heads_q, a.head_dim}, problem.torch_dtype,
                       problem.place, options.heads_first);
    set_rows(g.dq, tensors.dq, "dq", dq);
  }
  if ((wanted & want_k) != 0)
    set_rows(g.dk, tensors.dk, "dk", new_key_gradient(problem, k, options));
  if ((wanted & want_v) != 0)
    set_rows(g.dv, tensors.dv, "dv", new_key_gradient(problem, v, options));
  if ((wanted & want_bias) != 0 && options.bias)
    allocate_dbias(g, tensors.dbias, problem, *options.bias);
  if ((wanted & want_sinks) != 0 && options.sinks)
    tensors.dsinks = new_float({a.heads_q}, problem, g.dsinks);
  if ((wanted & want_scale) != 0) tensors.dscale = new_float({1}, problem, g.dscale);
  return tensors;
}

void expect_out(const Tensor& out, const char* name, const Problem& problem) {
  expect_dtype(out, name, problem.out_dtype, "the dtype of q, or that of out_dtype");
  expect_rows(out, name, problem);
}

void expect_dout(const Tensor& dout, const char* name, const Problem& problem) {
  expect_dtype(dout, name, problem.torch_dtype, "the dtype of q");
  expect_rows(dout, name, problem);
}

Tensor new_out(const Problem& problem, const Options& options) {
  const tilewise_attention& a = problem.attention;
  if (problem.varlen_q())
    return new_tensor({a.seqlen_q, a.heads_q, a.head_dim_v}, problem.out_dtype, problem.place);
  return new_rows({a.batch, a.seqlen_q, a.heads_q, a.head_dim_v}, problem.out_dtype, problem.place,
                  options.heads_first);
}

void run_forward(Problem& problem) {
  const Launch launch(problem);
  const int64_t bytes = workspace_of(problem, nullptr);
  const Workspace workspace(bytes, problem.place);
  check_status(tilewise_forward(&problem.attention, workspace.data(), bytes));
}

void run_backward(Problem& problem, const tilewise_gradients& gradients) {
  const Launch launch(problem);
  const int64_t bytes = workspace_of(problem, &gradients);
  const Workspace workspace(bytes, problem.place);
  check_status(tilewise_backward(&problem.attention, &gradients, workspace.data(), bytes));
}

void run_jvp(Problem& problem, const tilewise_tangents& tangents) {
  const Launch launch(problem);
  const int64_t bytes = workspace_of(problem, tangents, nullptr);
  const Workspace workspace(bytes, problem.place);
  check_status(tilewise_jvp(&problem.attention, &tangents, workspace.data(), bytes));
}

void run_second(Problem& problem, const tilewise_tangents& tangents,
                const tilewise_gradients& gradients) {
  const Launch launch(problem);
  const int64_t bytes = workspace_of(problem, tangents, &gradients);
  const Workspace workspace(bytes, problem.place);
  check_status(tilewise_second(&problem.attention, &tangents, &gradients, workspace.data(), bytes));
}

namespace {

// The operator forward or, with a third result, forward_max_logits.
void forward_of(StableIValue* stack, uint64_t inputs, bool with_max_logits) {
  Arguments arguments(stack, inputs);
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Options options(arguments);
  const bool with_lse_low = arguments.flag();

  Problem problem = describe(q, k, v, options);
  const Tensor out = new_out(problem, options);
  const Tensor lse = new_lse(problem, with_lse_low);
  problem.attention.out = view_of(out, "out");
  set_lse(problem, lse);

  if (!with_max_logits) {
    run_forward(problem);
    return put(stack, out, lse);
  }
  const Tensor max_logits = new_float({problem.attention.batch, problem.attention.heads_q}, problem,
                                      problem.attention.max_logits);
  run_forward(problem);
  put(stack, out, lse, max_logits);
}

}  // namespace

void forward(StableIValue* stack, uint64_t inputs, uint64_t) { forward_of(stack, inputs, false); }

void forward_max_logits(StableIValue* stack, uint64_t inputs, uint64_t) {
  forward_of(stack, inputs, true);
}

void backward(StableIValue* stack, uint64_t inputs, uint64_t) {
  Arguments arguments(stack, inputs);
  const Tensor dout = arguments.tensor();
  const OptionalTensor dlse = arguments.optional_tensor();
  const Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Tensor out = arguments.tensor(), lse = arguments.tensor();
  const Options options(arguments);
  const int64_t wanted = arguments.integer();

  Problem problem = describe(q, k, v, options);
  expect_out(out, "out", problem);
  problem.attention.out = view_of(out, "out");
  set_lse(problem, lse);

  tilewise_gradients g{};
  g.struct_size = sizeof(g);
  set_incoming(g, problem, dout, dlse);
  const GradientTensors made = new_gradients(g, problem, options, k, v, wanted);
  run_backward(problem, g);
  put(stack, made.dq, made.dk, made.dv, made.dbias, made.dsinks, made.dscale);
}

}  // namespace tilewise::torch_binding
